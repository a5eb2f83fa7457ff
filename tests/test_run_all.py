"""run_all.sh itself: the table, a recipe that fails, CIFAR-10 that cannot be had."""

import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT, SCRIPTS, copy_recipe, run


@pytest.mark.parametrize(("flag", "sentence"), [("--epoch", "--help lists"), ("--checkpoint", "are for one recipe")])
def test_a_wrong_flag_ends_it_at_once(flag, sentence, tmp_path):
    folder = copy_recipe(tmp_path / "project", *SCRIPTS)
    shutil.copy(ROOT / "run_all.sh", folder)
    finished = run(["bash", str(folder / "run_all.sh"), flag, "3"], PYTHON=sys.executable)
    assert finished.returncode == 2 and finished.stdout == ""
    assert finished.stderr.startswith("run_all.sh: ") and sentence in finished.stderr
    assert finished.stderr.count("\n") == 1 and not (folder / "logs").exists()


def test_two_at_once_in_one_folder_go_on_when_a_recipe_fails_and_say_so(tmp_path):
    folder = copy_recipe(tmp_path / "project", *SCRIPTS)
    shutil.copy(ROOT / "run_all.sh", folder)
    with open(folder / "ddp_spawn_train.py", "a") as file:
        file.write("    sys.exit(3)\n")
    flags = ["--epochs", "1", "--arch", "resnet18", "--image-size", "4", "--limit", "24", "--batch-size", "12"]
    with ThreadPoolExecutor() as pool:
        arguments = ["bash", str(folder / "run_all.sh"), *flags, "--seed"]
        both = [pool.submit(run, [*arguments, seed], cwd=tmp_path, timeout=900, PYTHON=sys.executable) for seed in "12"]
    logs = [shows_the_failure_and_the_rest(one.result(), folder) for one in both]
    assert sorted(logs) == sorted((folder / "logs").iterdir()) and logs[0] != logs[1]
    for log, seed in zip(logs, "12", strict=True):  # and none is the other's
        assert all(f"--seed {seed}`" in line for line in (log / "table.md").read_text().splitlines()[:1])


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
