"""Measure the decoding rate of two threads over that of one.

Each case is a function that works on packets or bytes in memory. One round runs it in one thread, then in two
threads for the same time, and divides the results; the order alternates, so that a change of the machine's
speed has no effect. A round counts only if hashlib (C code that does not hold the GIL and uses little memory)
did twice as much in two threads before and after it; otherwise other programs use a core. The median of the
rounds is printed as a table, and written as JSON with ``--json``. The ideal is 2.0; the difference is the
time in which a thread holds the GIL.

    python samples/benchmarks/decode_threads.py [--rounds 9] [--seconds 0.5] [--json result.json]
    python samples/benchmarks/decode_threads.py --beside-python [--rounds 9] [--seconds 0.5]

With ``--beside-python``, it prints how much longer a call takes beside a thread that runs Python without a
pause: with Python's switch interval of 5 ms, and with one of 0.2 ms. A call waits for one interval each time
that FFmpeg returns, so steps that are short and many suffer most.

Expected: 1.9 or more for video and images. With the GIL, MP3, AAC and windows of WAV gain little or lose; on
free-threaded CPython, they reach 1.9, too. The column "rounds" is the number of rounds that count. If it is
0, the machine was busy, and the figures are those of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from collections.abc import Callable

import numpy as np
from clocks import rate, two_over_one
from figures import add_output_options, machine, write_json

import spdl_media as sm
from spdl_media.testing import AudioTrack, VideoTrack, make_image, make_media

Case = Callable[[], object]

# In seconds: Python's own, and a short one.
INTERVALS = 5e-3, 0.2e-3


def make_cases() -> dict[str, Case]:
    """Return the cases by name."""
    pictures = moving_pictures(48, 640, 360)
    track = VideoTrack(frames=pictures, codec="libx264", gop_size=24, options={"qp": "24"})
    rate = 48000
    sound = np.random.default_rng(0).integers(-8000, 8000, (rate * 10, 2), np.int16)
    movie = make_media([track, AudioTrack(samples=sound, codec="flac")], format="mp4")
    jpeg = make_image(pictures[0], codec="mjpeg", options={"qmin": "3", "qmax": "3"})
    mp3 = make_media([AudioTrack(samples=sound, codec="libmp3lame")], format="mp3")
    aac = make_media([AudioTrack(samples=sound, codec="aac")], format="mp4")
    wav = make_media([AudioTrack(samples=sound, codec="pcm_s16le")], format="wav")
    video, audio = sm.demux_video(movie), sm.demux_audio(movie)
    # Bit rates and sizes as in datasets. The smaller the frames, the larger the share of Python's time.
    small = sm.get_video_filter_desc(scale_width=224, scale_height=224, pix_fmt="rgb24")
    return {
        "video, planes": lambda: sm.decode_packets(video, None),
        "video, rgb24": lambda: sm.decode_packets(video),
        "video, 224x224 rgb24": lambda: sm.decode_packets(video, small),
        "video, demux and decode": lambda: sm.decode_packets(sm.demux_video(movie), None),
        "jpeg, planes": lambda: sm.decode_packets(sm.demux_image(jpeg), None),
        "jpeg, 224x224 rgb24": lambda: sm.decode_packets(sm.demux_image(jpeg), small),
        "flac, packets": lambda: sm.decode_packets(audio),
        "mp3, 10 s": lambda: sm.load_audio(mp3),
        "mp3, window of 1 s": lambda: sm.load_audio(mp3, (4, 5)),
        "aac, 10 s": lambda: sm.load_audio(aac),
        "wav, window of 1 s": lambda: sm.load_audio(wav, (4, 5)),
    }


def moving_pictures(count: int, width: int, height: int) -> list[np.ndarray]:
    """Return frames of drifting noise, which must be coded in every frame."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    picture = noise.repeat(8, axis=0).repeat(8, axis=1)
    return [np.roll(picture, (3 * k, 5 * k), axis=(0, 1)) for k in range(count)]


def beside_python(case: Case, seconds: float, interval: float) -> float:
    """Return the calls per second beside a thread that counts."""
    stopped = threading.Event()

    def spin() -> None:
        while not stopped.is_set():
            pass

    thread, before = threading.Thread(target=spin), sys.getswitchinterval()
    sys.setswitchinterval(interval)
    thread.start()
    try:
        return rate([case], seconds)
    finally:
        stopped.set()
        thread.join()
        sys.setswitchinterval(before)


def compare_intervals(cases: dict[str, Case], rounds: int, seconds: float) -> None:
    """Print the time of a call beside a thread of Python over that alone, for each switch interval."""
    print(f"{'case':26}{'alone':>10}" + "".join(f"{each * 1e3:>8.1f} ms" for each in INTERVALS))
    for name, case in cases.items():
        case()
        ways = [
            [
                rate([case], seconds),
                *(beside_python(case, seconds, each) for each in INTERVALS),
            ]
            for _ in range(rounds)
        ]
        alone, *others = map(statistics.median, zip(*ways, strict=True))
        print(
            f"{name:26}{1e3 / alone:>7.2f} ms"
            + "".join(f"{alone / each:>10.1f}x" for each in others),
            flush=True,
        )


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="time per thread count and round"
    )
    add_output_options(parser, chart=False, markdown=False)
    parser.add_argument(
        "--beside-python", action="store_true", help="compare with a thread that runs Python"
    )
    options = parser.parse_args()
    if options.beside_python:
        compare_intervals(make_cases(), options.rounds, options.seconds)
        return
    results = {}
    print(f"{'case':26}{'one thread':>13}{'two threads':>13}{'ratio':>8}   lowest-highest  rounds")
    for name, case in make_cases().items():
        figures, rounds = two_over_one(case, options.rounds, options.seconds)
        results[name] = {**figures, "rounds": rounds}
        one, two, ratio = (figures[key]["median"] for key in ("one", "two", "ratio"))
        lowest, highest = (figures["ratio"][key] for key in ("lowest", "highest"))
        print(
            f"{name:26}{one:>11.1f}/s{two:>11.1f}/s{ratio:>8.2f}   {lowest:.2f}-{highest:.2f}"
            f"{rounds:>12}",
            flush=True,
        )
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    document = {"machine": machine("av"), "settings": settings, "results": results}
    write_json(document, options.json)


if __name__ == "__main__":
    main()
