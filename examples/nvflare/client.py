# Copyright (c) 2025, NVIDIA CORPORATION.  All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

"""
client side training scripts
"""

import argparse

import torch
from cifar import load_cifar
from model import SimpleNetwork
from torch import nn
from torch.optim import SGD

from d2pfed.learning import TorchRecords

# (1) import nvflare client API
import nvflare.client as flare
from nvflare.client.tracking import SummaryWriter


def evaluate(net, data_loader, device):
    correct = 0
    total = 0
    # since we're not training, we don't need to calculate the gradients for our outputs
    with torch.no_grad():
        for data in data_loader:
            # (optional) use GPU to speed things up
            images, labels = data[0].to(device), data[1].to(device)
            outputs = net(images)
            _, predicted = torch.max(outputs.data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()

        if total == 0:
            raise ValueError("Evaluation data_loader produced no samples; check data preparation and --test_size.")
        accuracy = 100 * correct // total
        print(f"Accuracy of the network on {total} test images: {accuracy} %")
    return accuracy


units = TorchRecords(SimpleNetwork(), load_cifar)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--train_size", type=int, default=50000)
    parser.add_argument("--test_size", type=int, default=10000)
    args = parser.parse_args()
    batch_size = args.batch_size
    epochs = args.epochs
    lr = 0.01
    model = SimpleNetwork()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loss = nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    # (3) initializes NVFlare client API
    flare.init()

    # Load datasets: each site has its own part
    train_set = load_cifar(flare.get_site_name(), args.sites, args.train_size)
    test_set = load_cifar(None, args.sites, args.test_size)

    train_loader = torch.utils.data.DataLoader(
        train_set, batch_size=batch_size, shuffle=True, num_workers=args.num_workers
    )
    test_loader = torch.utils.data.DataLoader(
        test_set, batch_size=batch_size, shuffle=False, num_workers=args.num_workers
    )

    sys_info = flare.system_info()
    client_name = sys_info["site_name"]
    last_params = None

    # (optional) metrics tracking
    summary_writer = SummaryWriter()

    while flare.is_running():
        # (4) receives FLModel from NVFlare
        input_model = flare.receive()
        print(f"site = {client_name}, current_round={input_model.current_round}")

        # Cross-site evaluation requests the client's latest local model without
        # sending model parameters in the request.
        if flare.is_submit_model():
            if last_params is None:
                error_msg = "submit_model called before a local model was trained"
                print(f"ERROR: {error_msg}")
                # TaskScriptRunner converts this exception into TOPIC_ABORT so the
                # executor can report the task failure instead of waiting for a result.
                raise RuntimeError(error_msg)
            print(f"site = {client_name}, submitting local model")
            flare.send(flare.FLModel(params=last_params))
            continue

        # (5) loads model from NVFlare
        model.load_state_dict(input_model.params)
        model.to(device)
        # (6) evaluate on received model for model selection
        accuracy = evaluate(model, test_loader, device)

        # (optional) Task branch for cross-site evaluation
        if flare.is_evaluate():
            print(f"site = {client_name}, running cross-site evaluation")
            # For CSE, just return the evaluation metrics without training
            output_model = flare.FLModel(metrics={"accuracy": accuracy})
            flare.send(output_model)
            continue

        steps = epochs * len(train_loader)
        for epoch in range(epochs):
            running_loss = 0.0
            for i, batch in enumerate(train_loader):
                images, labels = batch[0].to(device), batch[1].to(device)
                optimizer.zero_grad()

                predictions = model(images)
                cost = loss(predictions, labels)
                cost.backward()
                optimizer.step()

                running_loss += cost.item()
                if i % 2000 == 1999:
                    avg_loss = running_loss / 2000
                    print(f"[{epoch + 1}, {i + 1:5d}] loss: {avg_loss:.3f}")

                    # Optional: Log metrics
                    global_step = input_model.current_round * steps + epoch * len(train_loader) + i
                    summary_writer.add_scalar(tag="loss", scalar=avg_loss, global_step=global_step)

                    print(f"site={client_name}, Epoch: {epoch}/{epochs}, Iteration: {i}, Loss: {running_loss}")
                    running_loss = 0.0

        print(f"Finished Training for {client_name}")

        PATH = "./cifar_net.pth"
        last_params = {name: param.detach().cpu().clone() for name, param in model.state_dict().items()}
        torch.save(last_params, PATH)

        # (7) construct trained FL model
        output_model = flare.FLModel(
            params=last_params,
            metrics={"accuracy": accuracy},
            meta={"NUM_STEPS_CURRENT_ROUND": steps},
        )
        print(f"site: {client_name}, sending model to server.")
        # (8) send model back to NVFlare
        flare.send(output_model)


if __name__ == "__main__":
    main()
