"""Ranks with the gloo backend, as torchrun starts them: an epoch is stopped and continued by more ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent

# Each step waits for all ranks, so a rank with one more batch would never end.
RANK = """
    import itertools, json, pathlib, sys
    import torch
    import torch.distributed as dist
    import spdl_media as sm
    from spdl_media.source import DistributedRandomSampler

    folder, stop_after = pathlib.Path(sys.argv[1]), int(sys.argv[2])

    def load(item, rng):
        return item, int(rng.integers(2**40))

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    source = DistributedRandomSampler(31, seed=4, uneven="pad")
    loader = sm.DataLoader(source, preprocessor=load, batch_size=3, output_order="input")
    states = sorted(folder.glob("state-*.json"))
    if states:
        loader.load_state_dict([json.loads(path.read_text()) for path in states])
    epochs = []
    for epoch in range(loader.epoch, 2):
        items = []
        for batch in itertools.islice(loader, stop_after if epoch == 1 and stop_after else None):
            dist.all_reduce(torch.ones(1))
            items += batch
        epochs.append(items)
    dist.barrier()
    (folder / f"state-{rank}.json").write_text(json.dumps(loader.state_dict()))
    (folder / f"given-{world_size}-{rank}.json").write_text(json.dumps(epochs))
    dist.destroy_process_group()
"""


def torchrun(
    folder: Path, num_ranks: int, program: str, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run a program in several processes."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run(folder: Path, world_size: int, stop_after: int) -> list[Any]:
    """Run the ranks; return the items of each epoch by rank."""
    done = torchrun(folder, world_size, RANK, folder, stop_after)
    assert done.returncode == 0, done.stderr
    return [
        json.loads((folder / f"given-{world_size}-{rank}.json").read_text())
        for rank in range(world_size)
    ]


@pytest.mark.long
def test_two_ranks_stop_and_three_continue(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    two = run(tmp_path, 2, stop_after=2)
    three = run(tmp_path, 3, stop_after=0)

    first = [tuple(item) for rank in two for item in rank[0]]
    assert [len(rank[0]) for rank in two] == [16, 16]
    assert len({item for item, _ in first}) == 31
    assert [item for item, _ in two[0][0]] != [item for item, _ in two[0][1]]

    assert [len(rank[1]) for rank in two] == [6, 6]
    assert all(len(rank) == 1 for rank in three)
    before = [item for rank in two for item, _ in rank[1]]
    after = [item for rank in three for item, _ in rank[0]]
    # 19 items are left, and two are repeated, so that all ranks have equally many.
    assert [len(rank[0]) for rank in three] == [7, 7, 7]
    assert len(set(before)) == 12
    assert not set(before) & set(after)
    assert len(set(after)) == 19
    # Random numbers depend on the position in the epoch, so no two positions share any, repeated ones
    # included.
    second = [number for rank in (*two, *three) for _, number in rank[-1]]
    assert len(set(second)) == 33


SHAPES = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import torch
    import torch.distributed as dist
    from train_ddp import check_shapes

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # The last batch may be smaller.
    check_shapes(torch.zeros(8 - rank, 3, 16, 16))
    print("equal", flush=True)
    check_shapes(torch.zeros(8, 3, 16, 16 + rank))
"""


@pytest.mark.long
def test_ranks_with_items_of_different_shapes_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    done = torchrun(tmp_path, 2, SHAPES, CHECKOUT / "samples")
    assert done.returncode == 1
    assert done.stdout.count("equal") == 2
    assert (
        "ValueError: items differ between ranks: rank 0 has (3, 16, 16), rank 1 has (3, 16, 17)"
        in done.stderr
    )


THREADS = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import train_ddp

    train_ddp.make(Path(sys.argv[2]))
    assert train_ddp.train(Path(sys.argv[2]), None)
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print("threads:", [name for name in names if "gloo" in name], flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_no_thread_of_the_process_group_outlives_the_sample(tmp_path: Path) -> None:
    """A thread that frees a tensor while Python ends aborts the process, which busy machines show."""
    pytest.importorskip("torch.distributed")
    done = torchrun(tmp_path, 1, THREADS, CHECKOUT / "samples", tmp_path)
    assert "threads: []\n" in done.stdout, done.stdout + done.stderr
