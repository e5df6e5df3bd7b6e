"""A script in the manner of public image classification examples; it knows nothing of pacecar, and must not.

A small ResNet with batch normalization, a DataLoader with worker processes and a DistributedSampler, epochs with
`set_epoch`, a scheduler, meters, validation on a loader of its own.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Images(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        time.sleep(0.002)
        return torch.randn(3, 16, 16, generator=draw), index % 10


class BasicBlock(nn.Module):
    def __init__(self, planes_in: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes_in, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or planes_in != planes:
            self.downsample = nn.Sequential(nn.Conv2d(planes_in, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + identity)


def resnet(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    planes = width
    for stage in range(3):
        layers.append(BasicBlock(planes, width << stage, 1 if stage == 0 else 2))
        planes = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(planes, 10))


class AverageMeter:
    def __init__(self) -> None:
        self.sum = self.count = 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n

    @property
    def avg(self) -> float:
        return self.sum / max(1, self.count)


def train(loader, model, criterion, optimizer, epoch: int, rank: int, paces: list[float]) -> None:
    losses = AverageMeter()
    model.train()
    end = time.perf_counter()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        paces.append(time.perf_counter() - end)
        end = time.perf_counter()
        if i % 2 == 0 and rank == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] Loss {loss.item():.6f} ({losses.avg:.6f})", flush=True)


def validate(loader, model, criterion) -> float:
    losses = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            losses.update(criterion(model(images), target).item(), images.size(0))
    return losses.avg


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--fork", action="store_true", help="fork a child before the process group")
    parser.add_argument("--paces", action="store_true")
    args = parser.parse_args()
    if args.fork:
        child = os.fork()
        if child == 0:
            layer = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            for _ in range(5):
                layer(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, f"child: {code}\n".encode())  # in one piece, beside the other rank's
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(resnet(args.width))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    dataset = Images(args.images)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
    held_out = DataLoader(Images(16), batch_size=args.batch, num_workers=0)
    paces: list[float] = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, epoch, rank, paces)
        loss = validate(held_out, model, criterion)
        scheduler.step()
        if rank == 0:
            print(f"* loss {loss.hex()}", flush=True)
    if args.paces and rank == 0:
        print("paces", *paces)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads let go of their work: torch aborts at exit otherwise (pytorch issue 190489)


if __name__ == "__main__":
    main()
