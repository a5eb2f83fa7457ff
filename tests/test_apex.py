"""The two branches of apex_amp_train.py. Apex is a stand-in on the CPU here; test_gpu.py has the real one."""

import re
import shutil

import pytest
import torch
from conftest import ROOT, command, copy_script, result, run
from test_training import saved_by

STAND_IN = dict(PYTHONPATH=str(ROOT / "tests" / "stand_in"))
SAVE = "            save_checkpoint(args, stateful, epoch, metrics)\n"


def test_apex_scales_clips_and_steps_and_resumes_with_its_float32_weights(tmp_path):
    on_cpu = ('amp is None or args.device == "cpu" or args.compile', "amp is None")
    keep = (SAVE, f"{SAVE}            os.system(f'cp run.pt run.pt.{{epoch}}')\n")
    folder = copy_script(tmp_path / "unbroken", "apex_amp_train", on_cpu, keep)
    flags = "--backend apex --opt-level O2 --clip-grad 0.5 --checkpoint run.pt".split()
    arguments = command("apex_amp_train", *flags, nproc=1, folder=folder)
    finished = run(arguments, cwd=folder, **STAND_IN)
    assert result(finished)["opt_level"] == "O2" and "epoch 1 loss scale 128" in finished.stdout
    assert re.findall("APEX (.*)", finished.stdout)[:6] == ["scale_loss", "master_params", "step"] * 2

    (tmp_path / "resumed").mkdir()
    shutil.copy(folder / "run.pt.1", tmp_path / "resumed" / "run.pt")
    resumed = run(arguments, cwd=tmp_path / "resumed", **STAND_IN)
    assert "1 of 2 epochs are done" in resumed.stdout
    assert saved_by(tmp_path / "resumed") == saved_by(folder)
    saved = torch.load(folder / "run.pt", weights_only=True)
    assert not torch.equal(saved["amp"]["weights"][0], saved["net"]["conv1.weight"])


def test_torch_amp_unscales_before_it_clips_and_skips_a_step_that_overflows(tmp_path):
    norm = "nn.utils.clip_grad_norm_(net.parameters(), math.inf).item()"
    say = f"foreach=True)\n    optimizer.register_step_pre_hook(lambda *_: print('NORM', {norm}))\n"
    overflow = ("scaler.scale(loss)", "scaler.scale(loss * (math.inf if step == 1 else 1))")
    scale = ("GradScaler(args.device)", "GradScaler(args.device, init_scale=256)")
    folder = copy_script(tmp_path / "copy", "apex_amp_train", ("fused=True)\n", say), overflow, scale)
    flags = ["--epochs", "1", "--clip-grad", "0.125"]
    finished = run(command("apex_amp_train", *flags, nproc=1, folder=folder))
    norms = [float(norm) for norm in re.findall("NORM (.*)", finished.stdout)]
    assert norms == [pytest.approx(0.125, rel=2e-3)] * 4, finished.stderr  # of five steps, the first is skipped
    assert "loss scale 128" in finished.stdout
