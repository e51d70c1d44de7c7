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
This code show to use NVIDIA FLARE Job Recipe to connect both Federated learning client and server algorithm
and run it under different environments
"""
import argparse

from model import SimpleNetwork

from d2pfed.nvflare.recipe import PrivateFedAvgRecipe
from nvflare.recipe import SimEnv


def define_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--n_clients", type=int, default=2)
    parser.add_argument("--num_rounds", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--train_size", type=int, default=50000)
    parser.add_argument("--test_size", type=int, default=10000)
    parser.add_argument("--train_script", type=str, default="client.py")
    parser.add_argument("--cross_site_eval", action="store_true")
    parser.add_argument("--enable_log_streaming", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--launch_external_process",
        action="store_true",
        help="Run train_script in a separate subprocess instead of in-process.",
    )
    parser.add_argument(
        "--client_memory_gc_rounds",
        type=int,
        default=0,
        help="Release model params and run GC every N rounds to keep client RSS flat. 0 = disabled.",
    )

    return parser.parse_args()


def main():
    args = define_parser()

    n_clients = args.n_clients
    num_rounds = args.num_rounds
    batch_size = args.batch_size
    epochs = args.epochs
    train_args = f"--batch_size {batch_size} --epochs {epochs} --num_workers {args.num_workers}"
    train_args += f" --sites {n_clients} --train_size {args.train_size} --test_size {args.test_size}"

    recipe = PrivateFedAvgRecipe(
        name="hello-pt",
        min_clients=n_clients,
        num_rounds=num_rounds,
        privacy={"unit": "record", "epsilon": 8.0, "clip": 1.0, "records": 50_000, "batch_rate": 0.02, "dropouts": 0.0},
        evaluations={"final": {"classes": 10, "epsilon": 1.0}},
        # Model can be specified as class instance or dict config:
        model=SimpleNetwork(),
        # Alternative: model={"class_path": "model.SimpleNetwork", "args": {}},
        # For pre-trained weights: initial_ckpt="/server/path/to/pretrained.pt",
        train_script=args.train_script,
        launch_external_process=args.launch_external_process,
        client_memory_gc_rounds=args.client_memory_gc_rounds,
    )
    if args.enable_log_streaming:
        recipe.enable_log_streaming()

    env = SimEnv(num_clients=n_clients)
    run = recipe.execute(env)
    print()
    print("Job Status is:", run.get_status())
    print("Result can be found in :", run.get_result())
    print()


if __name__ == "__main__":
    main()
