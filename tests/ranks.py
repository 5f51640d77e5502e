# SPDX-License-Identifier: BSD-3-Clause
"""ranks: real processes over gloo for a test. A program is a file with cases; each rank runs all of them and says what came of each.

    launch("ddp_cases", "sharded_cases")  ->  {(program, case): [what rank 0 said, what rank 1 said]}      "" is well

In a program: @case on functions without arguments that return differences (a list, empty is well) or raise. A rank that raises goes
on with no other case (its peers would wait for it): the others run into the group's timeout. Several programs share the processes,
whose imports are what takes time.
"""

import datetime
import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
THOROUGH = "--thorough"
IS_THOROUGH = THOROUGH in sys.argv  # in a rank: all combinations, not a few of them
_cases = {}  # (program, name) -> function


def case(function):
    _cases[function.__module__, function.__name__] = function
    return function


def launch(*programs, n_ranks=2, timeout_s=150, group_timeout_s=30, is_thorough=False):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "import ranks; ranks.main()", folder, str(n_ranks), str(group_timeout_s), ",".join(programs),
                   THOROUGH if is_thorough else ""]
        ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, cwd=HERE) for rank in range(n_ranks)]
        try:
            errors = [process.communicate(timeout=timeout_s)[1] for process in ranks]
        except subprocess.TimeoutExpired:
            errors = [f"no answer within {timeout_s} s"] * n_ranks
        finally:
            for process in ranks:
                process.kill()
        said = [_said(Path(folder) / f"said{rank}", error) for rank, error in enumerate(errors)]
    return {(program, name): [each.get(f"{program}.{name}", each["at the end"]) for each in said]
            for program in programs for name in cases_of(program)}


def _said(path, error):
    return {"at the end": f"not run: {error[-2000:]}", **(json.loads(path.read_text()) if path.exists() else {})}


def cases_of(program):
    """Names of a program's cases, read from its text: nothing is imported."""
    lines = (HERE / f"{program}.py").read_text(encoding="utf-8").splitlines()
    return [after.split("def ")[1].split("(")[0] for line, after in zip(lines, lines[1:]) if line == "@case"]


def main():
    """One rank."""
    import torch
    import torch.distributed as dist
    folder, n_ranks, group_timeout_s, programs, _, rank = sys.argv[1:]
    torch.set_num_threads(1)
    for program in programs.split(","):
        importlib.import_module(program)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=int(n_ranks),
                            timeout=datetime.timedelta(seconds=int(group_timeout_s)))
    said = {}
    for (program, name), function in _cases.items():
        if program not in programs.split(","):
            continue  # a program that another one borrows from
        try:
            words = "; ".join(function() or [])[:2000]
        except BaseException:
            words = traceback.format_exc()[-4000:]
        said[f"{program}.{name}"] = words
        (Path(folder) / f"said{rank}").write_text(json.dumps(said))
        if "Traceback (most recent call last)" in words:
            break
    dist.destroy_process_group()
