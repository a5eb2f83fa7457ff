"""Silent errors: tests/mistakes.py makes each mistake, on two processes."""

import json
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run

NAMES = re.findall(r"(?m)^def (\w+)\(\):", Path(ROOT / "tests" / "mistakes.py").read_text())


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = run([*launcher, ROOT / "tests" / "mistakes.py", folder])
    assert finished.returncode == 0, finished.stderr
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_raises_no_error_and_is_wrong(name, seen):
    assert seen[name] == "seen"
