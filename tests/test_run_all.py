"""run_all.sh itself: the table, a recipe that fails, CIFAR-10 that cannot be had."""

import re
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT, SCRIPTS, SMALL, copy_recipe, run, wait_until_gone


@pytest.mark.parametrize(("flag", "sentence"), [("--epoch", "--help lists"), ("--checkpoint", "give them to one")])
def test_a_wrong_flag_ends_it_at_once(flag, sentence, tmp_path):
    folder = copy_recipe(tmp_path / "project", *SCRIPTS)
    shutil.copy(ROOT / "run_all.sh", folder)
    finished = run(["sh", str(folder / "run_all.sh"), flag, "3"], PYTHON=sys.executable)
    assert finished.returncode == 2 and finished.stdout == ""
    assert finished.stderr.startswith("run_all.sh: ") and sentence in finished.stderr
    assert finished.stderr.count("\n") == 1 and not (folder / "logs").exists()


def test_two_at_once_in_one_folder_one_with_a_recipe_that_fails_one_stopped(tmp_path, start):
    folder = copy_recipe(tmp_path / "project", *SCRIPTS)
    shutil.copy(ROOT / "run_all.sh", folder)
    with open(folder / "ddp_spawn_train.py", "a") as file:
        file.write("    sys.exit(3)\n")
    flags = ["--epochs", "1", "--arch", "resnet18", "--image-size", "4", "--limit", "24", "--batch-size", "12"]
    arguments = ["env", f"PYTHON={sys.executable}", "bash", str(folder / "run_all.sh"), *flags, "--seed"]
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(run, [*arguments, "1"], cwd=tmp_path, timeout=900)
        stopped = start([*arguments, "2"], cwd=tmp_path)
        # Past DDP by torchrun and by spawn, beside the other's.
        stopped.wait_for("== ddp_spawn: (?s:.)*technique", seconds=300)
        pids = [int(pid) for pid in re.findall(r"process ids \[(.*)\]", stopped.log.read_text())[-1].split(", ")]
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.process.wait(timeout=10) == 143, stopped.log.read_text()
        wait_until_gone(pids)
        first = shows_the_failure_and_the_rest(whole.result(), folder)
    second = folder / re.search(r"Stopped. The logs so far are in (logs/\S+)\n$", stopped.log.read_text())[1]
    assert sorted([first, second]) == sorted((folder / "logs").iterdir()) and first != second
    assert (first / "table.md").read_text().startswith("`bash run_all.sh") and not (second / "table.md").exists()
    both = whole.result().stderr, stopped.log.read_text()
    seeds = [re.findall(r"^== \w+: .*--seed (\d)", text, re.M) for text in both]
    assert [set(found) for found in seeds] == [{"1"}, {"2"}] and len(seeds[1]) == 4
    results = [len(re.findall("^RESULT ", path.read_text(), re.M)) for path in second.glob("*.log")]
    assert sorted(results)[-3:] == [1, 1, 1] and max(results) == 1  # and none is the other's


def test_ctrl_c_ends_it_and_says_where_the_logs_are(tmp_path, start):
    folder = copy_recipe(tmp_path / "project", *SCRIPTS)
    shutil.copy(ROOT / "run_all.sh", folder)
    arguments = ["bash", str(folder / "run_all.sh"), *SMALL, "--device", "cpu", "--epochs", "999"]
    running = start(["env", f"PYTHON={sys.executable}", *arguments])
    pids = running.pids()
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(timeout=10) == 130, running.log.read_text()
    wait_until_gone(pids)
    assert re.search(r"Stopped. The logs so far are in logs/\S+\n$", running.log.read_text())


def shows_the_failure_and_the_rest(finished, folder):
    """Check one run of run_all.sh in which ddp_spawn failed; return the folder of its logs."""
    assert finished.returncode == 1, finished.stderr
    rows = {}
    for line in finished.stdout.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0]] = cells[1:]
    baseline = "one_gpu" if torch.cuda.is_available() else "one_process"
    recipes = [baseline, "dp", "ddp_launch", "ddp_spawn"]
    recipes += [name for name in rows if re.fullmatch(r"(apex|torch)_O\d_\w+_ddp", name)]
    assert {f"torch_{level}_torch_ddp" for level in ("O0", "O1", "O3")} <= set(recipes)
    assert list(rows) == ["recipe", "---", *recipes]
    assert rows.pop("ddp_spawn")[0].startswith("failed, exit code 3: see logs/")
    assert rows[baseline][4] == "1.00"
    for recipe in recipes:
        if recipe in rows:
            assert len(rows[recipe]) == 7 and rows[recipe][-1].endswith("%"), rows
    # Nothing can be downloaded here, and the table says that its images are synthetic, and why.
    assert "Synthetic images, since there is no complete CIFAR-10 in data" in finished.stdout
    logs = folder / re.search(r"Logs and table.md are in (\S+)", finished.stderr)[1]
    assert {path.name for path in logs.iterdir()} == {"data.log", "table.md", *(f"{name}.log" for name in recipes)}
    assert (logs / "table.md").read_text() == finished.stdout
    return logs
