# SPDX-License-Identifier: BSD-3-Clause
"""random_programs: short programs of tensor operators, decoded from bytes, run plain and run in regions.

Words: a *program* is a tree of instructions. A *machine* holds its values and runs it once. A *setting* says how its
region nodes are run. The bytes are four per instruction (operator, three operands), so that shrinking works on them;
values are float tensors of 24 elements or fewer, and every operand is made to fit, so most programs run to the end.

    python tests/random_programs.py HEX [setting]        shows a program and what differs
    python tests/random_programs.py --seed 7 --count 500  many programs from one seed, without hypothesis
"""

import dataclasses
import functools
import math
import random
import sys
import warnings
import zlib

import torch
import torch.nn.functional as F
from bitwise import copied, differences, stress

import tfg
from tfg import _C

SHAPE = (4, 6)
OPERATORS = []  # functions of (machine, a, b, n); a and b are values, n is 0..255; what they return joins the values
NODES = ("region", "region", "region", "leaky region", "no_grad", "branch", "autocast", "twice")
MAX_DEPTH = 3
PER_NODE = 44  # first bytes below this open a node, the others are operators


def operator(function):
    OPERATORS.append(function)
    return function


# ------------------------------------------------------------------------------------------------- fitting operands
def matrix(x):
    """x as [4, 6] by views alone, where that is possible."""
    if x.shape == SHAPE:
        return x
    flat = x.reshape(-1)
    if flat.numel() >= 24:
        return flat[:24].view(SHAPE)
    return flat[:1].expand(24).view(SHAPE) if flat.numel() else x.new_ones(SHAPE)


def like(a, b):
    """b in the shape of a."""
    return b if b.shape == a.shape else matrix(b).reshape(-1)[0].expand(a.shape)


def mild(x):
    """Values in (-1, 1), so that long programs stay finite."""
    return x.tanh()


def writable(x, n):
    """x, or a copy where autograd would refuse the write; now and then the refusal is wanted."""
    refused = x.is_leaf and x.requires_grad and torch.is_grad_enabled()
    return x * 1 if (refused or may_overlap(x)) and n % 32 else x


def may_overlap(x):
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))


# ------------------------------------------------------------------------------------------------- pointwise
UNARY = (torch.sin, torch.cos, torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, torch.neg, F.softplus, F.elu, F.mish,
         lambda x: mild(x).exp(), lambda x: x.abs().add(1).log(), lambda x: x.square().add(1).sqrt(), lambda x: x.abs() + 1,
         lambda x: x.clamp(-1, 1), lambda x: x + 0.5, lambda x: mild(x) ** 3, lambda x: 1.5 / (x.abs() + 1), F.hardswish)
BINARY = (torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2, torch.hypot, lambda a, b: a / (b.abs() + 1),
          lambda a, b: torch.lerp(a, b.to(a.dtype), 0.3), lambda a, b: torch.addcmul(a, mild(a), b.to(a.dtype), value=0.5),
          lambda a, b: (a.abs() + 0.5) ** mild(b), torch.fmod)


@operator
def unary(m, a, b, n):
    return UNARY[n % len(UNARY)](a)


@operator
def binary(m, a, b, n):
    return BINARY[n % len(BINARY)](mild(a), like(a, b))


@operator
def where(m, a, b, n):
    return torch.where(like(a, b) > 0.1, a, like(a, b).to(a.dtype))


@operator
def masked(m, a, b, n):
    return a.masked_fill(like(a, b) < 0, 0.5 + n / 256)


@operator
def cast(m, a, b, n):
    return a.to((torch.float64, torch.bfloat16, torch.float32, torch.float16)[n % 4])


# ------------------------------------------------------------------------------------------------- matrices, norms
@operator
def matmul(m, a, b, n):
    a = matrix(mild(a))
    return a @ matrix(b).to(a.dtype).mT


@operator
def linear(m, a, b, n):
    a = matrix(a)
    return F.linear(a, m.weight.to(a.dtype), m.bias.to(a.dtype) if n % 2 else None)


@operator
def addmm(m, a, b, n):
    a = matrix(mild(a))
    return torch.addmm(a[:, :4], a, matrix(b).to(a.dtype).t(), beta=0.5)


@operator
def batched(m, a, b, n):
    a = matrix(mild(a)).view(2, 2, 6)
    return torch.bmm(a, matrix(b).to(a.dtype).view(2, 2, 6).mT)


@operator
def attention(m, a, b, n):
    q, k = matrix(mild(a)).view(1, 2, 4, 3), matrix(b).to(a.dtype).view(1, 2, 4, 3)
    extra = ({}, {"is_causal": True}, {"attn_mask": q[0, 0, :, :1] > 0}, {"dropout_p": 0.3})[n % 4]
    return F.scaled_dot_product_attention(q, k, k * 0.5, **extra)


@operator
def norm(m, a, b, n):
    a = matrix(a)
    scale = m.scale.to(a.dtype)
    return (F.layer_norm(a, (6,), scale, scale) if n % 4 == 0 else F.rms_norm(a, (6,), scale) if n % 4 == 1 else
            F.group_norm(a.view(1, 4, 6), 2) if n % 4 == 2 else F.normalize(a, dim=1))


@operator
def batch_norm(m, a, b, n):
    return F.batch_norm(matrix(a).float(), m.mean, m.variance, m.scale, m.bias, training=bool(n % 4), momentum=0.3)


@operator
def convolve(m, a, b, n):
    a = matrix(mild(a))
    return F.conv1d(a.view(1, 4, 6), matrix(b).to(a.dtype).view(4, 2, 3).repeat(1, 2, 1)[:, :, :2], padding=1)


@operator
def softmax(m, a, b, n):
    kinds = (a.softmax, a.log_softmax, a.logsumexp, a.cumsum)
    return kinds[n % 4](-1) if a.dim() else a.sin()


@operator
def reduce(m, a, b, n):
    a = matrix(a)
    kinds = (lambda: a.sum(0), lambda: a.mean(1, keepdim=True), lambda: a.amax(1), lambda: a.max(0).values,
             lambda: a.var(1), lambda: a.norm(), lambda: a.prod(1), lambda: a.std(), lambda: a.sort(1).values,
             lambda: a.topk(2).values, lambda: a.contiguous().median(1).values, lambda: a.cummax(0).values)
    return kinds[n % len(kinds)]()


@operator
def index(m, a, b, n):
    a = matrix(a)
    which = matrix(b).argsort(0)[:, 0]
    kinds = (lambda: a[which], lambda: a.index_select(0, which), lambda: a.gather(1, which[:, None]), lambda: a[a > 0],
             lambda: F.embedding(which, m.weight), lambda: a.scatter_add(0, which[None, :].repeat(1, 2)[:, :6], mild(a)[:1]),
             lambda: a.take(which), lambda: F.cross_entropy(a, which), lambda: a.index_add(0, which, mild(a)))
    return kinds[n % len(kinds)]()


@operator
def join(m, a, b, n):
    a, b = matrix(a), matrix(b)
    kinds = (lambda: torch.cat([a, b]), lambda: torch.stack([a, b.to(a.dtype)]).sum(0), lambda: torch.cat([a, a.detach()], 1),
             lambda: torch.einsum("ij,kj->ik", mild(a), b.to(a.dtype)), lambda: torch.cat([a[:0], b, a[1:]]))
    return kinds[n % 5]()


@operator
def split(m, a, b, n):
    a = matrix(a)
    kinds = (lambda: a.split([1, 3]), lambda: a.chunk(2, 1), lambda: a.unbind(0)[:2], lambda: torch.tensor_split(a, 3, 1))
    return kinds[n % 4]()


@operator
def foreach(m, a, b, n):
    return torch._foreach_mul([a, mild(a)], 1.5) if n % 2 else torch._foreach_sin([a, like(a, b)])


# ------------------------------------------------------------------------------------------------- views
@operator
def view(m, a, b, n):
    a = matrix(a)
    kinds = (lambda: a.t(), lambda: a[1:], lambda: a[:, ::2], lambda: a[n % 4], lambda: a.diagonal(), lambda: a.unsqueeze(0),
             lambda: a.narrow(1, 1, 3), lambda: a.unfold(1, 2, 2), lambda: a.view(2, 2, 6).transpose(0, 1), lambda: a.squeeze(),
             lambda: a.expand(2, 4, 6), lambda: a.flip(1), lambda: a.roll(1), lambda: a.detach(), lambda: a[:0], lambda: a.mT,
             lambda: torch.as_strided(a, (3, 4), (6, 1), a.storage_offset() + 1) if a.is_contiguous() else a,
             lambda: a.movedim(0, 1).contiguous(), lambda: a[..., None].permute(2, 1, 0), lambda: a.reshape(-1)[::5])
    return kinds[n % len(kinds)]()


@operator
def complex_view(m, a, b, n):
    c = torch.view_as_complex(matrix(mild(a)).float().contiguous().view(4, 3, 2))
    d = c.conj() * (c if n % 2 else c.exp())
    kinds = (lambda: torch.view_as_real(d.resolve_conj()), lambda: d.real, lambda: d.conj().imag, d.abs)
    return kinds[n % 4]()


@operator
def reinterpret(m, a, b, n):
    return a.detach().float().contiguous().view(torch.int32).bitwise_and(-2).view(torch.float32)


# ------------------------------------------------------------------------------------------------- writes
def write(x, other, n):
    """One in-place operator on x; now and then on memory that overlaps itself, which torch refuses."""
    x = x * 1 if may_overlap(x) and n % 16 else x
    other = like(x, other).to(x.dtype)
    kinds = (lambda: x.add_(0.5), lambda: x.mul_(other), lambda: x.copy_(other), lambda: x.tanh_(), lambda: x.clamp_(-1, 1),
             lambda: x.masked_fill_(other > 0, 0.25), lambda: x.add_(other, alpha=0.5), lambda: x.sigmoid_(), lambda: x.zero_(),
             lambda: x.relu_(), lambda: x.mul_(0.5).sin_(), lambda: x.addcmul_(other, other), lambda: x.neg_(),
             lambda: x.lerp_(other, 0.3), lambda: x.fill_(0.7), lambda: torch.sub(x, other, out=x) if not x.requires_grad else x.sub_(other))
    return kinds[n % len(kinds)]()


@operator
def write_whole(m, a, b, n):
    return write(writable(a, n), b, n)


@operator
def write_fresh(m, a, b, n):
    return write(a * 1.5, b, n)


@operator
def write_view(m, a, b, n):
    base = writable(a, n) if n % 3 else a * 1
    part = matrix(base)
    part = (part[1:], part[:, ::2], part.t()[2:], part[n % 4], part.diagonal(), part[1:][:, 1:3].t())[n // 16 % 6]
    write(part, b, n)
    return (base, part, base * 1)[n % 3]


@operator
def set_item(m, a, b, n):
    base = matrix(a) * 1
    base[n % 4] = matrix(b)[0].to(base.dtype)
    if n % 2:
        base[base > 0.3] = 0.1
    else:
        base[:, 1:3] += 0.5
    return base


@operator
def write_indexed(m, a, b, n):
    base = matrix(a) * 1
    rows = torch.tensor([0, n % 4])
    source = matrix(b)[:2].to(base.dtype)
    kinds = (lambda: base.index_add_(0, rows, source), lambda: base.index_copy_(0, torch.tensor([0, 3]), source),
             lambda: base.index_put_((rows,), source, accumulate=True), lambda: base.scatter_(0, rows[:, None].expand(2, 6), source),
             lambda: base.index_fill_(0, rows, 0.5))
    return kinds[n % 5]()


@operator
def write_detached(m, a, b, n):
    a.detach().add_(0.25) if not may_overlap(a) else None
    return mild(a)


@operator
def write_data(m, a, b, n):
    if not (a.is_leaf or may_overlap(a)):
        write(a.data, b, n)
    return a.sin() if n % 2 else None


@operator
def swap_data(m, a, b, n):
    x = a * 1
    y = x.sin()
    x.data = like(x, b).detach().to(x.dtype) * 2
    return y, x.cos()


@operator
def write_external(m, a, b, n):
    """Buffers are read and written by regions, as statistics and caches are."""
    with torch.no_grad():
        (m.buffer.copy_, m.buffer.add_, m.buffer.mul_, lambda t: m.buffer.lerp_(t, 0.5))[n % 4](matrix(mild(a)).detach().float())
        m.counter.add_(1)
    return None if n % 2 else a * m.counter


@operator
def read_external(m, a, b, n):
    return mild(a) * like(a, m.buffer if n % 2 else m.hidden)


@operator
def write_hidden(m, a, b, n):
    """An outside value that wants a gradient."""
    return m.hidden.mul_(0.5) if n % 2 else m.hidden[1:].add_(matrix(mild(a))[1:].float())


@operator
def write_parameter(m, a, b, n):
    """The one outside change that may end in tfg.Error."""
    if n % 8:
        return m.weight * a.mean()
    m.has_changed_a_parameter = True
    with torch.no_grad():
        m.weight.mul_(0.9)
    return None


@operator
def out_argument(m, a, b, n):
    into = torch.empty(SHAPE, dtype=a.dtype)
    return torch.sin(matrix(a).detach(), out=into), torch.mul(into, 2, out=torch.empty(0, dtype=a.dtype))


# ------------------------------------------------------------------------------------------------- randomness
@operator
def dropout(m, a, b, n):
    kinds = (lambda: F.dropout(a, 0.5), lambda: F.dropout(a * 1, 0.3, inplace=True),
             lambda: F.alpha_dropout(a, 0.2, training=True), lambda: F.rrelu(a, training=True))
    return kinds[n % 4]()


@operator
def mask(m, a, b, n):
    drawn = torch.empty_like(matrix(a)).bernoulli_(0.6)
    return matrix(a) * (drawn.div_(0.6) if n % 2 else drawn)


@operator
def noise(m, a, b, n):
    a = matrix(a)
    kinds = (lambda: torch.rand_like(a), lambda: torch.randn(SHAPE, dtype=a.dtype), lambda: torch.empty_like(a).uniform_(),
             lambda: torch.zeros_like(a).normal_().mul_(0.5), lambda: torch.randperm(6).to(a.dtype).expand(SHAPE),
             lambda: torch.normal(a, 1.0), lambda: torch.bernoulli(torch.full_like(a, 0.5)),
             lambda: torch.empty_like(a).exponential_().clamp_(max=2),
             lambda: torch.rand(SHAPE, generator=m.generator).to(a.dtype))
    return a * kinds[n % len(kinds)]()


@operator
def factory(m, a, b, n):
    a = matrix(a)
    return a + (torch.arange(6).to(a.dtype), torch.full((6,), 0.1), torch.ones(4, 1), torch.linspace(0, 1, 6),
                torch.tensor([0.5]), torch.eye(4, 6), torch.zeros_like(a).add_(0.5))[n % 7].to(a.dtype)


# ------------------------------------------------------------------------------------------------- autograd inside
@operator
def inner_gradient(m, a, b, n):
    with torch.enable_grad():
        x = a.detach().float().requires_grad_()
        (slope,) = torch.autograd.grad((x.sin() * x).sum() + x.mul(2).relu().sum(), x)
    return slope * like(slope, b)


@operator
def inner_leaf(m, a, b, n):
    leaf = matrix(a).detach().float().clone().requires_grad_()
    m.leaves.append(leaf)
    return leaf * 2


@operator
def hook(m, a, b, n):
    if a.requires_grad and torch.is_grad_enabled():
        a = a * 1
        a.register_hook(lambda g: g * 0.5)
    return a.sin()


@operator
def custom_function(m, a, b, n):
    return Cube.apply(mild(a), like(a, b).to(a.dtype))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        square = x * x
        ctx.save_for_backward(x, square, y)
        return square * x + y

    @staticmethod
    def backward(ctx, g):
        x, square, y = ctx.saved_tensors
        return g * 3 * square + 0 * x, g


# ------------------------------------------------------------------------------------------------- programs
@dataclasses.dataclass(frozen=True)
class Node:
    """An operator (body is None) or a span of instructions with a kind of its own."""

    kind: object
    a: int
    b: int
    n: int
    body: tuple = None


def decode(data):
    """The program that `data` spells, as a tuple of nodes, with the byte that picks what backward does."""
    words = [tuple(data[i:i + 4]) for i in range(0, len(data) - 3, 4)]
    return nodes(words, 0), data[0] if data else 0


def nodes(words, depth):
    found = []
    while words:
        first, a, b, n = words.pop(0)
        if first >= PER_NODE or depth == MAX_DEPTH:
            found.append(Node(OPERATORS[first % len(OPERATORS)], a, b, n))
            continue
        body, words[:] = words[:1 + n % 9], words[1 + n % 9:]
        found.append(Node(NODES[first % len(NODES)], a, b, n, nodes(body, depth + 1)))
    return tuple(found)


def listing(program, indent=""):
    """The program as lines of text."""
    lines = []
    for node in program:
        name = node.kind if node.body is not None else node.kind.__name__
        lines.append(f"{indent}{name} {node.a} {node.b} {node.n}")
        lines += listing(node.body, indent + "    ") if node.body is not None else []
    return lines


# ------------------------------------------------------------------------------------------------- machine
@dataclasses.dataclass(frozen=True)
class Setting:
    """How region nodes are run. whole: the program is one region. segment: regions of the top level that share a tape."""

    name: str
    is_taped: bool = True
    whole: bool = False
    segment: int = 0
    drop: bool = False
    verify: bool = False
    toggles: bool = False  # random drop points: the stress mode is switched by the program's own bytes
    room: int | None = None  # a budget: bytes above what is alive before; regions then keep, and leave under pressure
    squeezes: bool = False  # all that may leave does so at random points
    selects: bool = False  # a selective policy keeps the results of a third of the kinds of operators


PLAIN = Setting("plain", is_taped=False)
SETTINGS = (Setting("regions"), Setting("whole", whole=True), Setting("segments", segment=3),
            Setting("regions-drop", drop=True), Setting("whole-drop", whole=True, drop=True),
            Setting("segments-drop", segment=2, drop=True), Setting("segments-verify", segment=3, verify=True),
            Setting("whole-toggles", whole=True, toggles=True), Setting("regions-drop-verify", drop=True, verify=True),
            Setting("kept", room=2**40), Setting("kept-squeezed", room=2**40, squeezes=True),
            Setting("whole-squeezed", whole=True, room=2**40, squeezes=True), Setting("tight", room=0),
            Setting("whole-tight", whole=True, room=3000), Setting("segments-tight", segment=3, room=0),
            Setting("tight-verify", room=1000, verify=True), Setting("kept-drop", room=2**40, drop=True),
            Setting("selective", selects=True), Setting("whole-selective-squeezed", whole=True, selects=True, room=2**40, squeezes=True))
KEY = _C.new_key("random program")


def is_selected(context, op, *args, **kwargs):
    return zlib.crc32(str(op).encode()) % 3 == 0


SELECTION = functools.partial(tfg.create_selective_checkpoint_contexts, is_selected)


class Machine:
    def __init__(self, setting):
        self.setting, self.generator = setting, torch.Generator().manual_seed(3)
        draw = torch.Generator().manual_seed(11)

        def fresh(*shape):
            return torch.randn(*shape, generator=draw)
        self.leaves = [fresh(*SHAPE).requires_grad_() for _ in range(2)]
        self.weight, self.bias, self.scale = (fresh(*s).requires_grad_() for s in ((6, 6), (6,), (6,)))
        self.leaves += [self.weight, self.bias, self.scale]
        self.buffer, self.counter, self.mean, self.variance = fresh(*SHAPE), torch.zeros(()), fresh(6), fresh(6).abs()
        self.hidden = self.leaves[0].tanh() * 1
        self.values = [self.leaves[0], self.leaves[1], self.leaves[0] * 2, fresh(*SHAPE)]
        self.has_changed_a_parameter = False
        self.tape, self.n_on_tape = None, 0

    def run(self, program):
        if self.setting.whole and self.setting.is_taped:
            self.checkpoint(self.span, program, self.values)
        else:
            self.span(program, self.values, is_top=True)
        self.close()

    def checkpoint(self, *call):
        return tfg.checkpoint(*call, context_fn=SELECTION if self.setting.selects else None)

    def span(self, program, values, is_top=False):
        for node in program:
            if self.setting.toggles:
                _C.set_stress(bool((node.a ^ node.b) & 1), False)
            if self.setting.squeezes and (node.a ^ node.b) & 1:
                _C.evict(2**40)
            if node.body is None:
                self.one(node, values)
            else:
                self.open(node, values, is_top)
        return values[-1]

    def one(self, node, values):
        a, b = (values[-1 - i % min(6, len(values))] for i in (node.a, node.b))
        made = node.kind(self, a, b, node.n)
        made = made if isinstance(made, (tuple, list)) else (made,)
        values.extend(t for t in made if t is not None)

    def open(self, node, values, is_top):
        if node.kind == "leaky region":
            self.region(node, values, is_top)
        elif node.kind == "region":  # what it makes dies with it, but for its result
            values.append(self.region(node, list(values), is_top))
        elif node.kind == "branch":
            if values[-1].detach().float().sum().item() > 0:
                self.span(node.body, values)
        elif node.kind == "twice":
            self.span(node.body, values)
            self.span(node.body, values)
        else:
            with torch.no_grad() if node.kind == "no_grad" else torch.autocast("cpu", torch.bfloat16):
                self.span(node.body, values)

    def region(self, node, values, is_top):
        if not self.setting.is_taped:
            return self.span(node.body, values)
        if not (is_top and self.setting.segment):
            return self.checkpoint(self.span, node.body, values)
        if self.n_on_tape % self.setting.segment == 0:
            self.close()
            self.tape = _C.Tape()
        self.n_on_tape += 1
        return _C.run(self.tape, KEY, self.span, (node.body, values), {})

    def close(self):
        if self.tape is not None:
            self.tape.close()
            self.tape = None

    def backward(self, choice):
        """One of the ways in which gradients are asked for; what it returns is compared."""
        loss = sum(v.float().sum() if v.is_floating_point() else 0 for v in self.values[2:3] + self.values[-8:] if v.requires_grad)
        if not (torch.is_tensor(loss) and loss.requires_grad):
            return []
        if choice % 4 == 1:
            loss.backward(retain_graph=True)
            first = copied(leaf.grad for leaf in self.leaves)
            loss.backward()
            return first
        if choice % 4 == 2:
            slopes = torch.autograd.grad(loss, self.leaves, create_graph=True, allow_unused=True)
            twice = sum(s.square().sum() for s in slopes if s is not None and s.requires_grad)
            if torch.is_tensor(twice) and twice.requires_grad:
                twice.backward()
            return copied(slopes)
        if choice % 4 == 3:
            return copied(torch.autograd.grad(loss, self.leaves, allow_unused=True))
        loss.backward()
        return []

    def state(self):
        return {"values": copied(self.values), "grads": copied(leaf.grad for leaf in self.leaves), "buffer": self.buffer.clone(),
                "counter": self.counter.clone(), "statistics": copied([self.mean, self.variance]), "hidden": self.hidden.detach(),
                "generator": self.generator.get_state(), "random": torch.get_rng_state()}


def outcome(program, choice, setting):
    """(what the program leaves behind, the error's class or None, whether it changed a parameter)."""
    torch.manual_seed(5)
    machine, facts, failure = Machine(setting), {}, None
    with stress(setting.drop, setting.verify, setting.room):
        try:
            machine.run(program)
            facts["forward"] = torch.get_rng_state(), copied(machine.values)
            facts["asked"] = machine.backward(choice)
        except Exception as error:
            failure = error
        finally:
            machine.close()
    facts["state"] = machine.state() if failure is None else {"random": torch.get_rng_state()}
    return facts, failure, machine.has_changed_a_parameter


def complaints(data, settings=SETTINGS):
    """What is wrong with the program that `data` spells, per setting: {} where all agree with plain."""
    return compared(*decode(data), settings)


def compared(program, choice, settings):
    expected, expected_failure, _ = outcome(program, choice, PLAIN)
    found = {}
    for setting in settings:
        got, failure, has_changed_a_parameter = outcome(program, choice, setting)
        if isinstance(failure, tfg.Error) and has_changed_a_parameter:
            continue  # the documented departure: loud
        if wrong := mismatch(expected, expected_failure, got, failure):
            found[setting.name] = wrong
    return found


def mismatch(expected, expected_failure, got, failure):
    if type(expected_failure) is not type(failure):
        return [f"plain: {shown(expected_failure)}, tfg: {shown(failure)}"]
    return differences(expected, got)


def shown(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}" if error else "no error"


# ------------------------------------------------------------------------------------------------- by hand
def reduce_by_hand(data, settings):
    """Leave out instructions as long as the program still goes wrong."""
    size = math.inf
    while len(data) < size:
        size = len(data)
        for start in range(len(data) - 4, -1, -4):
            shorter = data[:start] + data[start + 4:]
            if complaints(shorter, settings):
                data = shorter
    return data


def show(data, settings=SETTINGS):
    print(data.hex(), *listing(decode(data)[0]), sep="\n    ")
    for name, wrong in complaints(data, settings).items():
        print(f"  {name}:", *wrong[:6], sep="\n      ")


def many(seed, count, most=8):
    """Run `count` programs; show the first `most` that go wrong, made small."""
    rng, n_wrong = random.Random(seed), 0
    for i in range(count):
        data = rng.randbytes(4 * rng.randint(1, 36))
        if found := complaints(data):
            settings = tuple(s for s in SETTINGS if s.name == next(iter(found)))
            print(f"program {i}: {', '.join(found)}")
            show(reduce_by_hand(data, settings), settings)
            n_wrong += 1
        if n_wrong == most:
            break
    print(f"seed {seed}: {i + 1} programs, {n_wrong} wrong")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if "--seed" in sys.argv:
        many(*(int(sys.argv[sys.argv.index(flag) + 1]) for flag in ("--seed", "--count")))
    else:
        wanted = [s for s in SETTINGS if s.name in sys.argv[2:]] or SETTINGS
        show(bytes.fromhex(sys.argv[1]), tuple(wanted))
