"""MergeNet's fusion in a Flower app of your own: python examples/mergenet_strategy.py (needs pip install "flwr[simulation]")"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits
from torch import nn

from oneround.federate.strategy import MergeNet

images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
images, client, server = images.float() / 16, ClientApp(), ServerApp()


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))


def train_on(net: nn.Module, mine: slice, steps: int = 30) -> nn.Module:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[mine]), labels[mine]).backward()
        optimizer.step()
    return net


@client.train()
def train(message: Message, context: Context) -> Message:
    net = network(16)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_on(net, slice(int(context.node_config["partition-id"]), 1500, 3))
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 500})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    teacher = train_on(network(128), slice(1500, 1797)).state_dict()
    strategy = MergeNet(teacher, pairs=[("0.weight", "0.weight")], start_round=2, fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(network(16).state_dict()), num_rounds=4)
    print(*strategy.trace, sep="\n")


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=3)
