# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tfg COMMAND`: each command is a function that takes the parsed arguments and returns the exit code."""

import argparse
import sys


def parser():
    top = argparse.ArgumentParser(prog="python -m tfg", description="Train inside the memory you have.")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    add_demo(commands)
    add_run(commands)
    return top


def add_demo(commands):
    demo = commands.add_parser(
        "demo", help="train a small transformer three ways and compare bits, memory and time",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    demo.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    demo.add_argument("--max-length", type=int, default=1024, help="longest batch in tokens, 128 to 4096")
    demo.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    demo.add_argument("--blocks", type=int, default=8, help="decoder blocks")
    demo.add_argument("--hidden", type=int, default=192, help="width of the model, a multiple of 64")
    demo.add_argument("--dropout", type=float, default=0.1, help="dropout after attention and after the MLP")
    demo.add_argument("--freeze", action="store_true", help="freeze the embedding and the lower third of the blocks")
    demo.add_argument("--bf16", action="store_true", help="run under bfloat16 autocast (slow on a CPU without bfloat16 units)")
    demo.add_argument("--seed", type=int, default=0, help="seed of weights, text and dropout")
    demo.add_argument("--png", default="demo.png", help="where the picture of memory over time goes")
    demo.set_defaults(run=run_demo)


def run_demo(arguments):
    from tfg import demo
    return demo.main(arguments)


def add_run(commands):
    run = commands.add_parser("run", help="run a training script with torch.utils.checkpoint replaced by tfg")
    run.add_argument("--budget", help='a ceiling for the device: "40GiB", "80%%", "auto"')
    run.add_argument("script", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    run.set_defaults(run=run_script)


def run_script(arguments):
    from tfg import patching
    patching.run_script(arguments.script, arguments.arguments, arguments.budget)
    return 0


def main(argv=None):
    arguments = parser().parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
