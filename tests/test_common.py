"""common.py: the data, its augmentation, the model, printing, seeding."""

import builtins
import os
import pickle
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision
from torchvision.datasets import CIFAR10

import common


def test_of_several_processes_one_downloads_cifar10(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="no data: .*; put cifar-10-python.tar.gz into .*, or use --synthetic"):
        common.load_cifar10(tmp_path)  # conftest.py lets nothing be downloaded

    def download(url, root, **kwargs):
        (tmp_path / CIFAR10.base_folder).mkdir()  # fails if another has downloaded it
        time.sleep(0.5)  # meanwhile, the others want the files, too
        content = pickle.dumps(dict(data=np.zeros((2, 3072), np.uint8), labels=[7, 3], label_names=[]))
        for name in ["batches.meta", *dict(CIFAR10.train_list + CIFAR10.test_list)]:
            (tmp_path / CIFAR10.base_folder / name).write_bytes(content)

    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5: os.path.isfile(path))
    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", download)
    at_once = ThreadPoolExecutor(4).map(common.load_cifar10, [tmp_path] * 4)  # processes wait alike
    for train, test in [*at_once, common.load_cifar10(tmp_path)]:
        assert [label for _, label in train] == [7, 3] * 5 and [label for _, label in test] == [7, 3]


def test_the_model_is_made_for_small_images_or_has_pretrained_weights(tmp_path, monkeypatch):
    for image_size, width in (64, 64), (65, 16):  # torchvision's first layers make images four times smaller
        model = common.build_resnet("resnet18", image_size)
        assert model.maxpool(model.conv1(torch.zeros(1, 3, 64, 64))).shape[-1] == width
    source = torchvision.models.resnet18().state_dict()
    (tmp_path / "checkpoints").mkdir()
    torch.save(source, tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    for pretrained, layers in ("all", 62), ("last", 2):
        model = common.build_resnet("resnet18", 32, pretrained).train()
        assert torch.equal(model.conv1.weight, source["conv1.weight"]) and model.fc.weight.requires_grad
        assert sum(weight.requires_grad for weight in model.parameters()) == layers
    model(torch.randn(4, 3, 32, 32))
    assert torch.equal(model.bn1.running_mean, source["bn1.running_mean"])  # frozen BatchNorm keeps its statistics


def test_augmentation_shifts_and_flips_each_image_on_its_own():
    # The same picture 500 times. Each result must be one of 81 parts of the mirrored picture, or one flipped.
    picture = torch.randint(256, (20, 40, 3), dtype=torch.uint8)
    mirrored = np.pad(picture, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    parts = torch.stack([torch.from_numpy(mirrored[y : y + 20, x : x + 40]) for y in range(9) for x in range(9)])
    expected = common.prepare(torch.cat([parts, parts.flip(2)]), None)
    images = common.prepare(picture.expand(500, 20, 40, 3), None, augment=True)
    possible, seen = ({image.numpy().tobytes() for image in batch} for batch in (expected, images))
    assert seen <= possible and len(seen) > 140


def test_images_are_resized_and_normalised_as_torchvision_does_and_float_images_stay_as_they_are():
    images = torch.randint(256, (3, 24, 24, 3), dtype=torch.uint8)
    transform = torchvision.models.ResNet50_Weights.DEFAULT.transforms  # by default, normalises as for ImageNet
    cifar10 = dict(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    for pretrained, numbers in (None, cifar10), ("all", {}), ("last", {}):
        expected = transform(crop_size=8, resize_size=8, **numbers)(images.permute(0, 3, 1, 2) / 255)
        torch.testing.assert_close(common.prepare(images, 8, pretrained), expected, rtol=1e-4, atol=1e-5)
        assert common.prepare(expected, 9, pretrained, augment=True) is expected
    assert common.prepare(images[:, :9, :8], 8).shape == (3, 3, 8, 8)


def test_other_ranks_print_only_by_force_or_to_a_file(monkeypatch, capsys):
    monkeypatch.setattr(builtins, "print", print)  # put back at the end
    for rank in 0, 1:
        common.setup_for_distributed(rank == 0)
        print("a", rank, sep="-", end=".")
        print("b", rank, force=True)
        print("c", rank, file=sys.stderr)
    assert capsys.readouterr() == ("a-0.b 0\nb 1\n", "c 0\nc 1\n")


def test_each_seed_epoch_and_rank_has_random_numbers_of_its_own():
    def draw(*numbers):
        common.seed_everything(*numbers)
        return random.random(), np.random.rand(), torch.rand(1).item()

    draws = [draw(*numbers) for numbers in ((21,), (22,), (21, 1), (21, 0, 1), (21, 1, 1), (21, 2, 0))]
    assert all(len(set(numbers)) == 6 for numbers in zip(*draws)) and draw(21, 0, 0) == draws[0]
