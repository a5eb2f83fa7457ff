"""What every script does, shown by runs with small networks on small synthetic images, on the CPU."""

import json
import re
import shutil
import sys

import pytest
import torch
import torchvision
from conftest import METRICS, ROOT, SCRIPTS, SMALL, command, copy_recipe, edited, result, run
from torch.utils._pytree import tree_map_only

CPU = [*SMALL, "--device", "cpu"]
TINY = [*CPU, "--image-size", "4"]
FOUND = "train_loss val_loss val_accuracy best_accuracy images_per_second gpus world_size seconds".split()
BUILD = "return common.build_resnet(args.arch, args.image_size, args.pretrained, args.freeze_backbone)"
FLOAT64 = [  # without BatchNorm and augmentation: the number of processes changes the rounding alone
    (BUILD, "return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 10)).double()"),
    ("args.pretrained, augment)\n", "args.pretrained).double()\n"),
    ("outputs.float()", "outputs"),
]
KILL = "if epoch == args.epochs and os.environ.get('RANK', '0') == '0': os.kill(os.getpid(), 9)"
KILL = ("        train_sums, ", f"        {KILL}\n        train_sums, ")


def step_losses(finished):
    result(finished)
    return [float(loss) for loss in re.findall(r"step \d+/\d+ loss (?:of rank 0: )?(\S+)", finished.stdout)]


def left_by(top):
    """Return what a run left in its files, without its flags and its speed, with hashes of the tensors' bits."""
    saved, best = (torch.load(top / name, weights_only=True) for name in ("run.pt", "run.pt.best"))
    del saved["flags"], saved["metrics"]["images_per_second"]
    return tree_map_only(torch.Tensor, lambda tensor: hash(tensor.numpy().tobytes()), (saved, best))


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_from_a_copy_with_common_alone_and_prints_the_agreed_lines(script, first_runs):
    finished, top = first_runs(script)
    found, alone = result(finished), script == "dp_train"
    flags = re.findall(r'\n    add\("__(\w+)"', (ROOT / f"{script}.py").read_text().replace("-", "_"))
    assert list(found) == ["script", *flags, *["precision", "torch_amp"] * (script == "apex_amp_train"), *FOUND]
    how = "O1 by torch" if script == "apex_amp_train" else "fp32"
    where = r"process \d+ on 0 GPUs" if alone else r"rank 0: process \d+ on cpu"
    agreed = rf"precision {how}, 0 of 3 epochs are done\n{where}\n"
    for epoch in 1, 2, 3:
        loss = "loss" if alone else "loss of rank 0:"
        agreed += "".join(rf"epoch {epoch} step {step}/5 {loss} \S+\n" for step in range(1, 6))
        agreed += rf"epoch {epoch} scale \d+\n" * (script == "apex_amp_train")
        agreed += rf"epoch {epoch} " + r" \S+ ".join(FOUND[:-3]) + r" \S+\n"
    agreed += rf'RESULT {{"script": "{script}.py", .*"world_size": {1 if alone else 2}, .*}}\n'
    rest, others = re.subn(r"rank 1: process \d+ on cpu\n|rank .: peak GPU memory 0 MiB\n", "", finished.stdout)
    assert re.fullmatch(agreed, rest) and others == (0 if alone else 3), finished.stdout
    losses = [float(loss) for loss in re.findall(r"train_loss (\S+)", finished.stdout)]
    assert losses[2] < losses[0] - 0.2 and found["train_loss"] == pytest.approx(losses[2], rel=1e-4)
    steps = step_losses(finished)
    assert not alone or losses == [pytest.approx(sum(steps[i : i + 5]) / 5, rel=1e-4) for i in (0, 5, 10)]
    assert {path.name for path in top.iterdir()} == {"project with a space", "run.pt", "run.pt.best"}


def test_from_a_notebook_launch_trains_like_torchrun_bit_for_bit_and_returns_the_metrics(tmp_path, first_runs):
    folder = copy_recipe(tmp_path / "project", "ddp_spawn_train")
    flags = [*CPU, "--epochs", "3", "--checkpoint", f"{tmp_path}/run.pt"]
    # As in a notebook, no other process can import what stands after -c.
    code = f"import json, ddp_spawn_train; print('RETURNED', json.dumps(ddp_spawn_train.launch({flags})))"
    finished = run([sys.executable, "-c", code], cwd=folder, real=True, TMPDIR=str(tmp_path))
    returned = json.loads(re.search("RETURNED (.*)", finished.stdout)[1])
    assert list(returned) == FOUND[:-3] and returned.items() <= result(finished).items()
    assert left_by(tmp_path) == left_by(first_runs("ddp_launch_train")[1])
    assert {path.name for path in tmp_path.iterdir()} == {"project", "run.pt", "run.pt.best"}


@pytest.mark.parametrize("script", ["dp_train", "apex_amp_train"])
def test_a_killed_run_resumes_and_ends_like_an_unbroken_one(script, first_runs, tmp_path):
    # With data-loading processes, as by default; the unbroken run has none.
    flags = [*(CPU if script == "dp_train" else TINY), *"--epochs 3 --workers 1 --checkpoint run.pt".split()]
    killed = run(command(script, *flags, folder=edited(tmp_path / "project", script, KILL)), cwd=tmp_path)
    finished = run(command(script, *flags), cwd=tmp_path)
    assert abs(killed.returncode) == 9 and ", 2 of 3 epochs are done" in finished.stdout, finished
    assert left_by(tmp_path) == left_by(first_runs(script)[1])


def test_O0_by_torch_equals_ddp_launch_train_bit_for_bit(tmp_path, first_runs):
    flags = [*CPU, "--epochs", "3", "--opt-level", "O0", "--checkpoint", f"{tmp_path}/run.pt"]
    assert "O0 by torch, " in run(command("apex_amp_train", *flags)).stdout
    left = left_by(tmp_path)
    assert left[0].pop("scaler") == {} and left == left_by(first_runs("ddp_launch_train")[1])


def test_a_checkpoint_of_another_level_or_backend_is_refused(tmp_path, first_runs):
    saved = torch.load(first_runs("apex_amp_train")[1] / "run.pt", weights_only=True)
    for other in dict(opt_level="O3"), dict(backend="apex"):
        torch.save(saved | dict(flags=saved["flags"] | other), tmp_path / "run.pt")
        arguments = command("apex_amp_train", *TINY, "--epochs", "3", "--checkpoint", "run.pt", nproc=1)
        [(name, value)] = other.items()
        assert f"run.pt has {name}={value}, not " in run(arguments, cwd=tmp_path).stderr


def test_every_test_image_counts_once_on_1_2_and_3_processes():
    # Nothing is trained, so the validation of 61 images does not depend on how many processes share them.
    flags = [*TINY, "--epochs", "1", "--freeze-backbone", "--lr", "0"]
    found = [result(run(command("ddp_launch_train", *flags, nproc=nproc))) for nproc in (1, 2, 3)]
    assert [one["world_size"] for one in found] == [1, 2, 3]
    for name in "val_loss", "val_accuracy":
        assert [one[name] for one in found] == pytest.approx([found[0][name]] * 3, rel=1e-6)


def test_two_processes_train_like_one_on_the_same_global_batch(tmp_path):
    folder = edited(tmp_path / "project", "ddp_launch_train", *FLOAT64)
    flags = [*CPU, "--epochs", "2", "--clip-grad", "0.5", "--checkpoint"]
    ends = []
    for nproc in 1, 2:
        path = tmp_path / f"{nproc}.pt"
        found = result(run(command("ddp_launch_train", *flags, str(path), nproc=nproc, folder=folder)))
        ends.append([torch.load(path, weights_only=True)["net"], *(found[name] for name in METRICS)])
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-12, atol=1e-12)
    assert ends[0][1:] == pytest.approx(ends[1][1:], rel=1e-12)


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train", "apex_amp_train"])
def test_all_processes_validate_with_the_same_network(script, tmp_path):
    say = "print(f'STATE {sum(x.double().sum().item() for x in network.state_dict().values())} ', force=True)"
    folder = edited(tmp_path / "project", script, ("    network.eval()\n", f"    network.eval()\n    {say}\n"))
    finished = run(command(script, *TINY, "--limit", "24", "--epochs", "2", folder=folder))
    a, b, c, d = re.findall(r"STATE (\S+)", finished.stdout)
    assert a == b != c == d


def test_pretrained_loads_all_weights_but_the_last_layer(tmp_path):
    net, url = torchvision.models.resnet18(), torchvision.models.ResNet18_Weights.DEFAULT.url
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(net.state_dict(), tmp_path / "hub" / "checkpoints" / url.rpartition("/")[2])
    flags = "--pretrained --freeze-backbone --image-size 65 --batch-size 60 --epochs 1 --checkpoint run.pt".split()
    result(run(command("ddp_spawn_train", *CPU, *flags), cwd=tmp_path, TORCH_HOME=str(tmp_path)))
    after = torch.load(tmp_path / "run.pt", weights_only=True)["net"]
    assert after.pop("fc.weight").shape == (10, 512) and after.pop("fc.bias").any() and len(after) == 100
    assert all(torch.equal(after[name], net.state_dict()[name]) for name in after)


def test_bf16_starts_with_nearly_the_losses_of_fp32(first_runs):
    finished = run(command("ddp_launch_train", *CPU, "--epochs", "1", "--precision", "bf16"))
    bf16, fp32 = step_losses(finished)[0], step_losses(first_runs("ddp_launch_train")[0])[0]
    assert bf16 != fp32 and bf16 == pytest.approx(fp32, rel=0.02)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compile_starts_with_the_losses_of_eager_mode(tmp_path):
    small = """from torch._inductor import config
    config.cpp.vec_isa_ok, config.compile_threads = False, 1  # four times faster
    return nn.Sequential(common.torchvision.models.resnet.BasicBlock(3, 3), nn.Flatten(), nn.Linear(192, 10))"""
    folder = edited(tmp_path / "project", "ddp_launch_train", (BUILD, small))
    arguments = command("ddp_launch_train", *CPU, "--limit", "24", "--epochs", "1", nproc=1, folder=folder)
    eager, compiled = run(arguments), run([*arguments, "--compile"], TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert result(compiled)["compile"] and list(tmp_path.glob("**/*.so"))
    assert len(step_losses(eager)) == 2 and step_losses(compiled) == pytest.approx(step_losses(eager), rel=1e-4)
