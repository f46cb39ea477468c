"""What :mod:`spdl_media.decode` is made of: decoders, and the path of frames through a filter."""
