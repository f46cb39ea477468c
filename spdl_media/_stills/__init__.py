"""Stills as bytes: which decoder takes them, and whether they are whole. No FFmpeg."""
