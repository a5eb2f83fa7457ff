"""run_all.sh: the table, a script that fails, a wrong flag, Ctrl-C."""

import os
import re
import shutil
import signal
import sys

import pytest
import torch
from conftest import ROOT, SCRIPTS, copy_script, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shows run_all.sh without a GPU")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    for script in SCRIPTS:
        copy_script(tmp_path / "copy", script)
    shutil.copy(ROOT / "run_all.sh", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("flag", ["--epoks", "--checkpoint"])
def test_a_flag_that_not_all_scripts_have_ends_it_at_once(flag, folder):
    finished = run(["bash", str(folder / "run_all.sh"), flag, "fp32"])
    assert finished.returncode == 2 and finished.stdout == "" and not (folder / "logs").exists()
    assert flag in finished.stderr.splitlines()[-1] and "Traceback" not in finished.stderr


def test_it_learns_without_a_gpu_and_shows_failures_in_its_table(folder):
    # One script leaves a process behind that keeps its output open; run_all.sh must not wait for it.
    leave = "import os; os.system('sleep 100 & echo LEFT $!'); raise SystemExit(3)"
    (folder / "ddp_spawn_train.py").write_text(leave)
    (folder / "ddp_launch_train.py").write_text("print('no result')")
    finished = run(["bash", str(folder / "run_all.sh")])
    os.kill(int(re.search(r"LEFT (\d+)", finished.stderr)[1]), signal.SIGKILL)
    assert finished.returncode == 1, finished.stderr
    lines = [line for line in finished.stdout.splitlines() if "|" in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    table = {row[0]: dict(zip(rows[0], row)) for row in rows[2:]}
    assert list(table) == ["one_process", "dp", "ddp_launch", "ddp_spawn", "torch_O1"]
    assert table["ddp_launch"]["GPUs"].startswith("failed, exit code 0: see logs/")
    assert table["ddp_spawn"]["GPUs"].startswith("failed, exit code 3: see logs/")
    for name in "one_process", "dp", "torch_O1":
        assert float(table[name]["accuracy"].rstrip("%")) > 60 and float(table[name]["images/s"]) > 0
        assert table[name]["processes"] == ("2" if name == "torch_O1" else "1")
    assert table["one_process"]["speed-up"] == "1.00"
    logs = folder / re.search(r"The logs and table.md are in (\S+)", finished.stderr)[1]
    assert (logs / "table.md").read_text() == finished.stdout
