"""The calls of Apex in apex_amp_train.py, with a stand-in for Apex on the CPU. Real Apex: test_gpu.py."""

import re
import shutil

import pytest
import torch
from conftest import ROOT, command, copy_script, result, run
from test_training import saved_by

CPU_TOO = ('amp is None or args.device == "cpu" or args.compile', "amp is None")
SAVE = "            save_checkpoint(args, stateful, epoch, metrics)\n"
KEEP = f"{SAVE}            os.system(f'cp run.pt run.pt.{{epoch}}')\n"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = copy_script(tmp_path_factory.mktemp("apex"), "apex_amp_train", CPU_TOO, (SAVE, KEEP))
    flags = "--backend apex --opt-level O2 --clip-grad 0.5 --checkpoint run.pt".split()
    arguments = command("apex_amp_train", *flags, nproc=1, folder=folder)
    return arguments, folder, run(arguments, cwd=folder, PYTHONPATH=str(ROOT / "tests" / "stand_in"))


def test_apex_scales_the_loss_clips_the_float32_weights_and_steps_in_this_order(unbroken):
    finished = unbroken[2]
    assert result(finished)["opt_level"] == "O2"
    calls = re.findall("APEX (.*)", finished.stdout)
    assert calls[:7] == ["initialize O2", *["scale_loss", "master_params", "step"] * 2]
    assert "epoch 1 loss scale 128" in finished.stdout


def test_a_resumed_run_has_the_float32_weights_and_ends_like_an_unbroken_one(unbroken, tmp_path):
    arguments, folder, _ = unbroken
    shutil.copy(folder / "run.pt.1", tmp_path / "run.pt")
    finished = run(arguments, cwd=tmp_path, PYTHONPATH=str(ROOT / "tests" / "stand_in"))
    assert "1 of 2 epochs are done" in finished.stdout and result(finished)
    assert saved_by(tmp_path) == saved_by(folder)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert not torch.equal(saved["amp"]["weights"][0], saved["net"]["conv1.weight"])
