# SPDX-License-Identifier: BSD-3-Clause
"""ranks: real processes over gloo for a test. A program is a file with cases; each rank runs all of them and says what came of each.

    launch("ddp_cases.py")  ->  {case: [what rank 0 said, what rank 1 said]}      "" is well; else the reason

In the program: @case on functions without arguments that return differences (a list, empty is well) or raise, and main() at its
end. A rank that raises goes on with no other case (its peers would wait for it): the others run into the group's timeout.
"""

import datetime
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = {}
IS_THOROUGH = "thorough" in sys.argv[4:]  # in a program: all combinations, not a few of them


def case(function):
    CASES[function.__name__] = function
    return function


def launch(program, n_ranks=2, timeout_s=150, is_thorough=False):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / program), folder, str(n_ranks)]
        more = ["thorough"] if is_thorough else []
        ranks = [subprocess.Popen([*command, str(rank), *more], stderr=subprocess.PIPE, text=True, cwd=HERE) for rank in range(n_ranks)]
        try:
            errors = [process.communicate(timeout=timeout_s)[1] for process in ranks]
        except subprocess.TimeoutExpired:
            errors = [f"no answer within {timeout_s} s"] * n_ranks
        finally:
            for process in ranks:
                process.kill()
        said = [_said(Path(folder) / f"said{rank}", error) for rank, error in enumerate(errors)]
    return {name: [each.get(name, each["at the end"]) for each in said] for name in cases_of(program)}


def _said(path, error):
    return {"at the end": f"not run: {error[-2000:]}", **(json.loads(path.read_text()) if path.exists() else {})}


def cases_of(program):
    """Names of a program's cases, read from its text: nothing is imported."""
    lines = (HERE / program).read_text().splitlines()
    return [after.split("def ")[1].split("(")[0] for line, after in zip(lines, lines[1:]) if line == "@case"]


def main(timeout_s=30):
    """What a program ends with. timeout_s: of the group."""
    import torch
    import torch.distributed as dist
    folder, n_ranks, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n_ranks,
                            timeout=datetime.timedelta(seconds=timeout_s))
    said = {}
    for name, function in CASES.items():
        try:
            said[name] = "; ".join(function() or [])[:2000]
        except BaseException:
            said[name] = traceback.format_exc()[-4000:]
        (Path(folder) / f"said{rank}").write_text(json.dumps(said))
        if said[name].startswith("Traceback"):
            break
    dist.destroy_process_group()
