"""The gradients: several processes compute what one would, and Apex and torch.amp scale and clip."""

import re
import shutil

import pytest
import torch
from conftest import ROOT, command, copy_script, result, run
from test_training import saved_by

# A network in float64 without BatchNorm, and no augmentation: then the number of processes changes rounding only.
RESNET = "common.build_resnet(args.arch, args.image_size, args.pretrained, args.freeze_backbone)"
FLOAT64 = [
    (RESNET, "nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 10)).double()"),
    ("args.pretrained, augment)", "args.pretrained).double()"),
    ("outputs.float()", "outputs"),
]


def test_1_2_and_3_processes_train_and_validate_alike_on_the_same_global_batch(tmp_path):
    # 59 images are no equal shares for 2 or 3 processes: each must be validated once, none twice.
    folder, weights, metrics = copy_script(tmp_path / "copy", "ddp_launch_train", *FLOAT64), [], []
    for nproc in 1, 2, 3:
        flags = ["--limit", "59", "--clip-grad", "0.5", "--checkpoint", f"{tmp_path}/{nproc}.pt"]
        found = result(run(command("ddp_launch_train", *flags, nproc=nproc, folder=folder)))
        metrics.append([found[name] for name in ("val_loss", "val_accuracy")])
        weights.append(torch.load(tmp_path / f"{nproc}.pt", weights_only=True)["net"])
    for other in 1, 2:
        torch.testing.assert_close(weights[other], weights[0], rtol=1e-12, atol=1e-12)
        assert metrics[other] == pytest.approx(metrics[0], rel=1e-12)


def test_ranks_have_their_own_images_and_random_numbers_and_validate_the_same_network(tmp_path):
    epoch = "        model.train()\n"
    order = "        print('ORDER', epoch, rank, torch.rand(1).item(), *sampler, force=True)\n"
    network = "        val_sums = validate("
    total = "sum(value.double().sum().item() for value in net.state_dict().values())"
    state = f"        print('STATE', epoch, {total}, force=True)\n"
    folder = copy_script(tmp_path / "copy", "ddp_spawn_train", (epoch, epoch + order), (network, state + network))
    finished = run(command("ddp_spawn_train", folder=folder))
    assert result(finished)
    lines = [line.split() for line in sorted(re.findall(r"ORDER (.*)", finished.stdout))]  # by epoch, then by rank
    assert [line[:2] for line in lines] == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert len({line[2] for line in lines}) == 4
    images = [line[3:] for line in lines]
    assert not set(images[0]) & set(images[1]) and not set(images[2]) & set(images[3])
    assert images[0] != images[2] and len(images[0]) == 30
    states = re.findall(r"STATE (.*)", finished.stdout)
    assert len(states) == 4 and len(set(states)) == 2  # one in each epoch


def run_and_resume(tmp_path, flags, *edits, **settings):
    """Run apex_amp_train.py for two epochs, and its second epoch again. Return the first run and both folders."""
    save = "            save_checkpoint(args, stateful, epoch, metrics)\n"
    keep = (save, f"{save}            os.system(f'cp run.pt run.pt.{{epoch}}')\n")
    unbroken = copy_script(tmp_path / "unbroken", "apex_amp_train", keep, *edits)
    arguments = command("apex_amp_train", *flags.split(), "--checkpoint", "run.pt", nproc=1, folder=unbroken)
    finished = run(arguments, cwd=unbroken, **settings)
    assert result(finished)
    (tmp_path / "resumed").mkdir()
    shutil.copy(unbroken / "run.pt.1", tmp_path / "resumed" / "run.pt")
    assert "1 of 2 epochs are done" in run(arguments, cwd=tmp_path / "resumed", **settings).stdout
    return finished, unbroken, tmp_path / "resumed"


def test_apex_scales_clips_and_steps_and_resumes_like_an_unbroken_run(tmp_path):
    on_cpu = ('amp is None or args.device == "cpu" or args.compile', "amp is None")
    flags, path = "--backend apex --opt-level O2 --clip-grad 0.5", str(ROOT / "tests" / "stand_in")
    finished, unbroken, resumed = run_and_resume(tmp_path, flags, on_cpu, PYTHONPATH=path)
    assert "epoch 1 loss scale 128" in finished.stdout
    assert re.findall("APEX (.*)", finished.stdout)[:6] == ["scale_loss", "master_params", "step"] * 2
    assert saved_by(resumed) == saved_by(unbroken)


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
