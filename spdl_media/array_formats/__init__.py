"""Arrays and archives straight from bytes: NumPy files, WAV and tar, without FFmpeg.

Labels, features and waveforms come as ``.npy``, ``.npz`` and ``.wav`` files inside tar shards. The readers
here give views of the memory that they are handed, check every size against it before anything is
allocated, and never unpickle.

``npy``      :func:`load_npy`: one array
``npz``      :func:`load_npz`, :class:`NpzFile`: arrays by name, stored or deflated
``wav``      :func:`load_wav`, :func:`parse_wav`: samples, or what the header says of them
``tar``      :func:`iter_tarfile`: members of an archive, also of one that cannot seek
``samples``  :func:`iter_samples`: members grouped by key, out of many shards

What is wrong with such a file is an :class:`~spdl_media.ArrayFormatError`.
"""
