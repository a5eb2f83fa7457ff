"""run_all.sh itself: the table, a recipe that fails, CIFAR-10 that cannot be had."""

import shutil
import sys

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


def test_it_goes_on_when_a_recipe_fails_and_says_so(tmp_path):
    folder = copy_recipe(tmp_path / "project", *SCRIPTS)
    shutil.copy(ROOT / "run_all.sh", folder)
    with open(folder / "ddp_spawn_train.py", "a") as file:
        file.write("    sys.exit(3)\n")
    flags = ["--epochs", "1", "--arch", "resnet18", "--image-size", "4", "--limit", "24", "--batch-size", "12"]
    finished = run(["bash", str(folder / "run_all.sh"), *flags], cwd=tmp_path, timeout=600, PYTHON=sys.executable)
    assert finished.returncode == 1, finished.stderr
    rows = {}
    for line in finished.stdout.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0]] = cells[1:]
    baseline = "one_gpu" if torch.cuda.is_available() else "one_process"
    recipes = [baseline, "dp", "ddp_launch", "ddp_spawn", *(f"torch_{level}_torch_ddp" for level in ("O0", "O1", "O3"))]
    assert list(rows) == ["recipe", "---", *recipes]
    assert rows.pop("ddp_spawn")[0].startswith("failed, exit code 3: see logs/")
    assert rows[baseline][4] == "1.00"
    for recipe in recipes:
        if recipe in rows:
            assert len(rows[recipe]) == 7 and rows[recipe][-1].endswith("%"), rows
    # Nothing can be downloaded here, and the table says that its images are synthetic, and why.
    assert "Synthetic images, since there is no complete CIFAR-10 in data" in finished.stdout
    [logs] = (folder / "logs").iterdir()
    assert {path.name for path in logs.iterdir()} == {"data.log", "table.md", *(f"{name}.log" for name in recipes)}
    assert (logs / "table.md").read_text() == finished.stdout
