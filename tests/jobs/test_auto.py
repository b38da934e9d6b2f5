"""compression="auto" on links that bind: what it takes, and whether what it says of a step comes true."""

from __future__ import annotations

import re

import pytest
from job import Start


@pytest.mark.parametrize(("words", "wanted"), [("auto", "int8"), ("auto:1.0", "topk:0.01|sign")])
def test_a_slow_link(words: str, wanted: str, start: Start) -> None:
    ended = start(
        2,
        """
        hvd.init()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(4, 500)).square().mean().backward()
            optimizer.step()
        """,
        ranks_per_node=1,
        env={"HIERCOMM_CROSS_RATE": "20mbit", "HIERCOMM_COMPRESSION": words},
    ).end()
    assert ended.status == 0, ended.output
    (chosen,) = re.findall(r"compression=auto: 1.02 MB of gradients .*: (\S+) it is\n", ended.output)
    assert re.fullmatch(wanted, chosen), ended.output
    ((measured, with_, expected),) = re.findall(
        r"exchanges between the nodes took (\S+) ms a step, with (\S+); (\S+) were expected\n", ended.output
    )
    assert with_ == chosen
    if chosen == "int8":  # the link binds whatever else the machine does
        assert float(measured) == pytest.approx(float(expected), rel=0.25), ended.output
