"""Readers of NumPy files, WAV and tar archives, without FFmpeg.

Labels, features and waveforms are often stored as ``.npy``, ``.npz`` and ``.wav`` files inside tar shards.
These readers return views of the given memory, check every size against the file's before they allocate
memory, and never unpickle.

``npy``  :func:`load_npy`: one array
``npz``  :func:`load_npz`, :class:`NpzFile`: arrays by name, stored or deflated
``wav``  :func:`load_wav`, :func:`parse_wav`: samples, or the header only
``tar``  :func:`iter_tarfile`: members of an archive, also of one that cannot seek

A file that is damaged or not supported raises :class:`~spdl_media.ArrayFormatError`.
"""
