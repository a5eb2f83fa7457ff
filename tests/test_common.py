"""common.py: the data, its augmentation, the model, printing, seeding."""

import os
import pickle
import random
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision
from torchvision.datasets import CIFAR10
from torchvision.transforms.v2 import functional

import common


def test_of_several_processes_one_downloads_cifar10(tmp_path, monkeypatch):
    downloads, labels = [], [*range(10)] * 2
    content = pickle.dumps(dict(data=np.zeros((20, 3072), np.uint8), labels=labels, label_names=[]))

    def download(url, root, **kwargs):
        downloads.append(url)
        time.sleep(0.5)  # meanwhile, the others want the files, too
        for name in ["batches.meta", *dict(CIFAR10.train_list + CIFAR10.test_list)]:
            (tmp_path / CIFAR10.base_folder / name).write_bytes(content)

    with pytest.raises(SystemExit, match="no data: .*; put cifar-10-python.tar.gz into .*, or use --synthetic"):
        common.load_cifar10(tmp_path)
    (tmp_path / CIFAR10.base_folder).mkdir()
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5: os.path.isfile(path))
    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", download)
    threads = ThreadPoolExecutor(4)  # they wait for a file's lock like processes
    for train, test in threads.map(common.load_cifar10, [tmp_path] * 4):
        assert train.tensors[1].tolist() == labels * 5 and test.tensors[1].tolist() == labels
    assert len(downloads) == 1


def test_pretrained_weights_are_loaded_to_train_all_layers_or_the_last_one(tmp_path, monkeypatch):
    source, downloads = torchvision.models.resnet18().state_dict(), []
    path = tmp_path / "checkpoints" / "resnet18-f37072fd.pth"
    path.parent.mkdir()

    def download(url, **options):
        downloads.append(options)
        torch.save(source, path)

    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    for pretrained, layers, statistics in ("all", 62, True), ("last", 2, False):
        model = common.build_resnet("resnet18", 32, pretrained, classes=12).train()
        assert torch.equal(model.conv1.weight, source["conv1.weight"]) and model.fc.weight.shape[0] == 12
        assert sum(weight.requires_grad for weight in model.parameters()) == layers
        assert model.fc.weight.requires_grad
        before = model.bn1.running_mean.clone()
        model(torch.randn(4, 3, 32, 32))
        assert torch.equal(model.bn1.running_mean, before) != statistics  # frozen BatchNorm keeps its statistics
    assert downloads == [dict(progress=False, check_hash=True, weights_only=True)]  # once


def test_a_model_for_small_images_keeps_their_size_and_starts_with_residual_branches_of_zero():
    small, large = (common.build_resnet("resnet18", size) for size in (64, 65))
    images = torch.randn(2, 3, 64, 64)
    assert [model.maxpool(model.conv1(images)).shape[-1] for model in (small, large)] == [64, 16]
    assert small.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert not small.layer1[0].bn2.weight.any()


def test_prepare_shifts_and_flips_each_image_on_its_own():
    # The same picture 500 times; its pixels hold their row and column. Each result must be one of 162 pictures.
    picture = np.stack(np.meshgrid(np.arange(20), np.arange(40), [0], indexing="ij"), 3)[:, :, 0].astype(np.uint8)
    pad = np.pad(picture, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    possible = {pad[y : y + 20, x : x + 40][:, ::i].tobytes() for y in range(9) for x in range(9) for i in (1, -1)}
    images = torch.from_numpy(picture).expand(500, 20, 40, 3)
    torch.manual_seed(0)
    shifted = common.shift_and_flip(images)
    seen = {image.numpy().tobytes() for image in shifted}
    assert len(possible) == 162 and seen <= possible and len(seen) > 140
    torch.manual_seed(0)
    assert torch.equal(common.prepare(images, 32, augment=True), common.prepare(shifted, 32))


@pytest.mark.parametrize("pretrained", [None, "all"])
def test_prepare_resizes_and_normalises_as_torchvision_does(pretrained):
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training set
    if pretrained:
        preset = torchvision.models.ResNet50_Weights.DEFAULT.transforms()
        mean, std = preset.mean, preset.std
    images = torch.randint(256, (3, 20, 24, 3), dtype=torch.uint8)
    expected = images.permute(0, 3, 1, 2) / 255
    for size in None, 32, 8:
        resized = functional.resize(expected, [size, size], antialias=True) if size else expected
        expected_now = functional.normalize(resized, mean, std)
        torch.testing.assert_close(common.prepare(images, size, pretrained), expected_now, rtol=1e-4, atol=1e-5)


def test_only_the_main_process_prints_to_the_screen(capsys, monkeypatch):
    monkeypatch.setattr("builtins.print", print)  # put back at the end
    common.setup_for_distributed(is_master=True)
    common.setup_for_distributed(is_master=False)  # also after another call
    print("silent")
    print("silent", file=sys.stdout)
    print("forced", "too", sep=", ", force=True)
    traceback.print_exc()  # it calls print(..., file=sys.stderr)
    assert capsys.readouterr() == ("forced, too\n", "NoneType: None\n")


def test_a_seed_an_epoch_and_a_rank_give_python_numpy_and_pytorch_numbers_of_their_own():
    def draw(*numbers):
        common.seed_everything(*numbers)
        return random.random(), np.random.rand(), torch.rand(1).item()

    keys = [(seed, epoch, rank) for seed in (0, 1) for epoch in (0, 1) for rank in (0, 1)]
    draws = [draw(*key) for key in keys]
    assert draws == [draw(*key) for key in keys] and draw(1) == draw(1, 0, 0)
    assert all(len(set(column)) == len(keys) for column in zip(*draws))
