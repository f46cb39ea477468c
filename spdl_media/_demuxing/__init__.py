"""What :mod:`spdl_media.demux` is made of: the open container, windows of time, chunks, first pictures."""
