"""What :mod:`spdl_media.convert` asks of frames before it copies them."""
