"""common.py: the data, its augmentation, the network, printing."""

import os
import pickle
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision
from torchvision.datasets import CIFAR10

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
    source = torchvision.models.resnet18().state_dict()
    (tmp_path / "checkpoints").mkdir()
    torch.save(source, tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    for pretrained, layers, statistics in ("all", 62, True), ("last", 2, False):
        net = common.build_resnet("resnet18", 32, pretrained, classes=12).train()
        assert torch.equal(net.conv1.weight, source["conv1.weight"]) and net.fc.weight.shape[0] == 12
        assert sum(weight.requires_grad for weight in net.parameters()) == layers and net.fc.weight.requires_grad
        before = net.bn1.running_mean.clone()
        net(torch.randn(4, 3, 32, 32))
        assert torch.equal(net.bn1.running_mean, before) != statistics  # frozen BatchNorm keeps its statistics


def test_prepare_normalises_and_shifts_and_flips_each_image_on_its_own():
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
    square, (mean, std) = images[:, :, :20], torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]])
    torch.testing.assert_close(common.prepare(square, 20), ((square / 255 - mean) / std).permute(0, 3, 1, 2))


def test_only_the_main_process_prints_to_the_screen(capsys, monkeypatch):
    monkeypatch.setattr("builtins.print", print)  # put back at the end
    common.setup_for_distributed(is_master=True)
    common.setup_for_distributed(is_master=False)  # also after another call
    print("silent")
    print("silent", file=sys.stdout)
    print("forced", "too", sep=", ", force=True)
    traceback.print_exc()  # it calls print(..., file=sys.stderr)
    assert capsys.readouterr() == ("forced, too\n", "NoneType: None\n")
