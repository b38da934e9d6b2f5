"""Compressed training goes on in jobs of other sizes, by the lines in the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from job import ROOT, Start

import hiercomm.torch as hvd

SAVE, *LOAD = re.findall(
    r"^(torch\.save\(optimizer.*|states = .*|.*merge_optimizer_states.*)\n", (ROOT / "README.md").read_text(), re.M
)
NAMES = ("int8", "topk:0.05", "powersgd:2")
PROGRAM = f"""
NAMES = {NAMES!r}
hvd.init()
loaded, ranks_then, now = sys.argv[1], int(sys.argv[2]), sys.argv[3]
base = os.path.dirname(os.path.abspath(__file__))
for name in NAMES:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 48, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=name)
    if ranks_then:
        os.chdir(f"{{base}}/{{loaded}}/{{name}}")
        {LOAD[0]}
        {LOAD[1]}
        assert len(optimizer.state_dict()["state"]) == 1
    for step in range(1 if ranks_then else 3):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        (model(x).square().sum() * (not ranks_then)).backward()
        optimizer.step()
        arrived = model.weight.grad.clone()
        optimizer.zero_grad()
    folder = f"{{base}}/{{now}}/{{name}}"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    {SAVE}
    assert len({{each.numpy().tobytes() for each in hvd.allgather_object(arrived)}}) == 1
    if hvd.rank() == 0:
        torch.save(arrived, "arrived.pt")
    hvd.barrier()
"""


def left_out(folder: Path) -> Any:
    """What a job has yet to bring, of the one gradient; None where nothing is compressed."""
    states = [torch.load(path) for path in folder.glob("optimizer-*.pt")]
    found = hvd.merge_optimizer_states(states).get("hiercomm")
    if found is None:
        return None
    ((coding,),) = [list(part.values()) for part in found["codings"]]
    return coding["inherited"][0]["residual"].reshape(48, 64)


def test_what_is_left_out_is_kept_from_job_to_job(start: Start, tmp_path: Path) -> None:
    """Without gradients it comes, or is still left out. On one node it is dropped, with a word."""
    before = ""
    for ranks, ranks_per_node in ((4, 2), (3, 1), (3, 2), (2, 2)):
        now = f"{ranks}-{ranks_per_node}"
        arguments = before or "-", before.partition("-")[0] or "0", now
        ended = start(ranks, PROGRAM, *arguments, ranks_per_node=ranks_per_node).end()
        assert ended.status == 0, ended.output
        single = ranks <= ranks_per_node
        said = ended.output.count("what compressors remembered is dropped: on one node nothing is compressed")
        assert said == (len(NAMES) if single else 0), ended.output
        for name in NAMES if before else ():
            wanted, left = left_out(tmp_path / before / name), left_out(tmp_path / now / name)
            arrived = torch.load(tmp_path / now / name / "arrived.pt")
            assert wanted.any()
            if single:
                assert left is None
                assert not arrived.any()
            else:
                assert float((arrived + left - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max()), (name, now)
        before = now
