"""What :mod:`spdl_media.inputs` is made of: memory, readers for FFmpeg, URLs, sizes that files state."""
