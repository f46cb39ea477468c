"""What the filter modules are made of: FFmpeg's graph syntax, wiring, and chains that need no graph."""
