"""What two ranks agree upon, over a real process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import vllm_like
from vllm_like import like

torch = pytest.importorskip("torch")

from rollspec.head.ranks import NOTHING, Note, Ranks  # noqa: E402

SUPPORT = Path(vllm_like.__file__).parent
RANK = """
import json, sys
import torch
from vllm_like import like
from rollspec.head.ranks import NOTHING, Note, Ranks

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def all_gather(input_, dim):
    parts = [torch.empty_like(input_) for _ in range(2)]
    torch.distributed.all_gather(parts, input_)
    return torch.cat(parts, dim)


group = like(
    "vllm.distributed.parallel_state:GroupCoordinator",
    cpu_group=torch.distributed.group.WORLD, first_rank=0, is_first_rank=rank == 0, all_gather=all_gather
)
ranks = Ranks(group)
said = Note("swap", json.dumps({"dir": "/a/b\\u00e4", "canary": False})) if rank == 0 else NOTHING
out = [ranks.least(2 - rank), ranks.least(2)]
for passes, note in ((3, said), (0, Note("rolled_back") if rank == 0 else NOTHING), (-1, NOTHING)):
    passes, note = ranks.decide(passes if rank == 0 else 7, note)
    out.append([passes, note.kind, note.text])
out.append(ranks.gather(torch.full((2, 1), float(rank)))[:, 0].tolist())
print(json.dumps(out))
"""


def test_two_ranks_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    started = [
        subprocess.Popen([*command, str(r), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True, cwd=SUPPORT)
        for r in (0, 1)
    ]
    try:
        found = [json.loads(p.communicate(timeout=120)[0]) for p in started]
    finally:
        for p in started:
            p.kill()
    assert found[0] == found[1]
    least, ready, swap, back, nothing, gathered = found[0]
    assert (least, ready) == (1, 2)
    assert swap == [3, "swap", '{"dir": "/a/b\\u00e4", "canary": false}']
    assert back == [0, "rolled_back", ""] and nothing == [-1, "", ""]
    assert gathered == [0.0, 0.0, 1.0, 1.0]


def test_one_rank_asks_no_other() -> None:
    alone = Ranks()
    assert alone.alone and alone.first and alone.least(1) == 1
    assert alone.decide(2, Note("promoted")) == (2, Note("promoted"))
    weight = torch.ones(2, 2)
    assert alone.gather(weight) is weight
    assert not Ranks(like("vllm.distributed.parallel_state:GroupCoordinator", is_first_rank=False)).first
    assert alone.decide(0, NOTHING) == (0, NOTHING)
