# SPDX-License-Identifier: BSD-3-Clause
"""rerun devices: the random state of the devices other than the CPU, put back for a second run.

The stock keeps that of the devices of one type that its positional arguments lie on, and warns of others. Here every device of the
accelerator and of every type an argument lies on counts: a region may go to another card than its arguments, and there is nothing to
warn of.
"""

import contextlib
import functools

import torch

from ._engine import C


@functools.cache
def _accelerator():
    """The device type of this process's accelerator, or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def types_of(args, kwargs):
    """The device types beside the CPU that a call may draw from: the accelerator's, and those its arguments lie on."""
    accelerator = _accelerator()
    found = (accelerator,) if accelerator is not None else ()
    return found + tuple(name for name in dict.fromkeys(C.elsewhere(args) + C.elsewhere(kwargs)) if name not in found)


def _initialised(device_type):
    """torch.cuda or its like, once it is in use; None before, or where such devices have no state to keep."""
    module = getattr(torch, device_type, None)
    return module if getattr(module, "_initialized", False) else None


def _each_state(types):
    """(type, index, state) of every device of these types that is in use. No device is made the current one: that would wake it."""
    for device_type in types:
        module = _initialised(device_type)
        for index in range(module.device_count()) if module else ():
            yield device_type, index, module.get_rng_state(index)


def _put_back(states):
    for device_type, index, state in states:
        _initialised(device_type).set_rng_state(state, index)


class DeviceStates:
    """The states of all devices of these types, as they were when this was made."""

    def __init__(self, types):
        self.types, self.states = types, list(_each_state(types))
        self._asleep = [name for name in types if _initialised(name) is None]

    @contextlib.contextmanager
    def in_force(self):
        """These states inside the `with`, afterwards those from before it."""
        before = list(_each_state(self.types))
        _put_back(self.states)
        try:
            yield
        finally:
            _put_back(before)

    def check_not_initialised_since(self):
        """RuntimeError where a device came into use after this was made: its state is not here."""
        if any(_initialised(name) is not None for name in self._asleep):
            raise RuntimeError("PyTorch's device state was initialized in the forward pass of a Checkpoint, which is not allowed. Use the "
                               "device once before, or pass preserve_rng_state=False.")
