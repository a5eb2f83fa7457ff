"""Several processes compute what one would: the same gradients and the exact validation."""

import re

import pytest
import torch
from conftest import command, copy_script, result, run

# A network in float64 without BatchNorm, and no augmentation: then the number of processes changes rounding only.
FLOAT64 = [
    (
        "return common.build_resnet(args.arch, args.image_size, args.pretrained, args.freeze_backbone)",
        "return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 10)).double()",
    ),
    ("images = common.prepare(images, args.image_size, args.pretrained, augment)",
     "images = common.prepare(images, args.image_size).double()"),
    ("outputs.float()", "outputs"),
]  # fmt: skip


def test_1_2_and_3_processes_train_and_validate_alike_on_the_same_global_batch(tmp_path):
    # 61 images are no equal shares for 2 or 3 processes: each must be validated once, none twice.
    folder, weights, metrics = copy_script(tmp_path / "copy", "ddp_launch_train", *FLOAT64), [], []
    for nproc in 1, 2, 3:
        flags = ["--clip-grad", "0.5", "--checkpoint", f"{tmp_path}/{nproc}.pt"]
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
