/* SPDX-License-Identifier: BSD-3-Clause */
#include "cut.h"

#include <math.h>
#include <string.h>

enum { NONE = -1, READ_UNMADE = -2 };

/* An arc of the network and, beside it at index ^ 1, the one that takes its flow back. */
typedef struct arc {
    double capacity;
    int32_t to;
    int32_t next;
} arc;

/* What the search knows of an operator. */
typedef struct site {
    double price;
    double freed_bytes; /* of wanted nodes, when it is replayed */
    double cost_ns;
    int32_t first_need; /* needs[first_need] up to the next site's: operators that must replay with it */
    int32_t part;       /* which part of the search it is in; NONE: never replayed */
    int32_t vertex;     /* in the network of that part */
} site;

/* A vertex of the network; the last two are the source and the sink. */
typedef struct vertex {
    int32_t first_arc;
    int32_t next_arc; /* not yet tried in this phase */
    int32_t level;    /* arcs from the source; NONE: not reached */
} vertex;

/* A stretch of `order` whose operators are priced together, or parted. */
typedef struct stretch {
    int32_t begin;
    int32_t end;
} stretch;

struct tfg_cut {
    tfg_allocator allocator;
    site *sites;
    int32_t *makers; /* by node: the operator that makes it, NONE, or READ_UNMADE */
    int32_t *needs;
    int32_t *order;
    int32_t *parted; /* one stretch, while it is parted */
    int32_t *queue;
    int32_t *path; /* arcs from the source to where the search stands */
    vertex *vertices;
    arc *arcs;
    stretch *todo;
    int32_t sites_capacity, makers_capacity, needs_capacity, order_capacity, parted_capacity, queue_capacity,
        path_capacity, vertices_capacity, arcs_capacity, todo_capacity;
    int32_t n_arcs;
    int32_t n_parts;
};

#define CUT_ARRAYS(ROW)                                                                                        \
    ROW(sites, site)                                                                                           \
    ROW(makers, int32_t)                                                                                       \
    ROW(needs, int32_t)                                                                                        \
    ROW(order, int32_t)                                                                                        \
    ROW(parted, int32_t)                                                                                       \
    ROW(queue, int32_t)                                                                                        \
    ROW(path, int32_t)                                                                                         \
    ROW(vertices, vertex)                                                                                      \
    ROW(arcs, arc)                                                                                             \
    ROW(todo, stretch)

tfg_status tfg_cut_create(const tfg_allocator *allocator, tfg_cut **out) {
    *out = allocator->resize(allocator->ctx, NULL, 0, sizeof(tfg_cut));
    if (*out == NULL) {
        return TFG_ERR_MEMORY;
    }
    memset(*out, 0, sizeof(tfg_cut));
    (*out)->allocator = *allocator;
    return TFG_OK;
}

void tfg_cut_destroy(tfg_cut *cut) {
    if (cut == NULL) {
        return;
    }
    const tfg_allocator allocator = cut->allocator;
#define CUT_FREE(name, type)                                                                                   \
    if (cut->name != NULL) {                                                                                   \
        allocator.resize(allocator.ctx, cut->name, (size_t)cut->name##_capacity * sizeof(type), 0);            \
    }
    CUT_ARRAYS(CUT_FREE)
#undef CUT_FREE
    allocator.resize(allocator.ctx, cut, sizeof(tfg_cut), 0);
}

/* n + 2 of everything for n operators (a site past the end, the source and the sink), and two arcs per connection. */
static tfg_status reserve(tfg_cut *cut, const tfg_cut_graph *graph) {
    const int64_t n_ops = (int64_t)graph->n_ops + 2;
    const int64_t n_sites = n_ops, n_order = n_ops, n_parted = n_ops, n_queue = n_ops, n_path = n_ops,
                  n_vertices = n_ops, n_todo = n_ops, n_makers = graph->n_nodes, n_needs = graph->n_refs,
                  n_arcs = 2 * (n_ops + (int64_t)graph->n_refs);
#define CUT_RESERVE(name, type)                                                                                \
    {                                                                                                          \
        void *block = cut->name;                                                                               \
        TFG_TRY(tfg_allocator_reserve(&cut->allocator, &block, &cut->name##_capacity, n_##name, sizeof(type))); \
        cut->name = block;                                                                                     \
    }
    CUT_ARRAYS(CUT_RESERVE)
#undef CUT_RESERVE
    return TFG_OK;
}

/* ---- the graph -------------------------------------------------------------------------------------------------- */

static tfg_status add_up(const char *name, int32_t i, int64_t number, int64_t *sum, tfg_error *err) {
    const int64_t most = INT64_MAX / 2;
    if (number < 0 || number > most - *sum) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%s of %d: wanted 0 to %lld, got %lld", name, i,
                        (long long)(most - *sum), (long long)number);
    }
    *sum += number;
    return TFG_OK;
}

static tfg_status check_counts(const tfg_cut_graph *graph, tfg_error *err) {
    const bool is_missing = (graph->n_ops > 0 && graph->ops == NULL) || (graph->n_nodes > 0 && graph->nodes == NULL) ||
                            (graph->n_refs > 0 && graph->refs == NULL);
    if (graph->n_ops < 0 || graph->n_nodes < 0 || graph->n_refs < 0 || is_missing) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%d operators, %d nodes, %d refs, or an array of them is missing",
                        graph->n_ops, graph->n_nodes, graph->n_refs);
    }
    int64_t all_bytes = 0;
    for (int32_t n = 0; n < graph->n_nodes; n++) {
        TFG_TRY(add_up("bytes", n, graph->nodes[n].size_bytes, &all_bytes, err));
    }
    return TFG_OK;
}

/* Who makes what. A node that is read before it is made could lean on itself, so it may not be made any more. */
static tfg_status take_op(tfg_cut *cut, const tfg_cut_graph *graph, int32_t o, tfg_error *err) {
    const tfg_cut_op *op = &graph->ops[o];
    const int64_t first_write = (int64_t)op->first_ref + op->n_reads;
    const int64_t end = first_write + op->n_writes;
    if (op->first_ref < 0 || op->n_reads < 0 || op->n_writes < 0 || end > graph->n_refs) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: refs %d to %lld of %d", o, op->first_ref, (long long)end,
                        graph->n_refs);
    }
    for (int64_t r = op->first_ref; r < end; r++) {
        const int32_t node = graph->refs[r];
        if (node < 0 || node >= graph->n_nodes) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: node %d of %d", o, node, graph->n_nodes);
        }
        if (r < first_write) {
            cut->makers[node] = cut->makers[node] == NONE ? READ_UNMADE : cut->makers[node];
        } else if (cut->makers[node] != NONE) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d makes node %d, which was there before", o, node);
        } else {
            cut->makers[node] = o;
        }
    }
    return TFG_OK;
}

static tfg_status take_graph(tfg_cut *cut, const tfg_cut_graph *graph, tfg_error *err) {
    int64_t all_ns = 0;
    for (int32_t n = 0; n < graph->n_nodes; n++) {
        cut->makers[n] = NONE;
    }
    for (int32_t o = 0; o < graph->n_ops; o++) {
        TFG_TRY(add_up("ns", o, graph->ops[o].cost_ns, &all_ns, err));
        TFG_TRY(take_op(cut, graph, o, err));
    }
    return TFG_OK;
}

/* What each operator frees, and which others must replay with it. */
static void find_sites(tfg_cut *cut, const tfg_cut_graph *graph) {
    int32_t n_needs = 0;
    for (int32_t o = 0; o < graph->n_ops; o++) {
        const tfg_cut_op *op = &graph->ops[o];
        const int32_t *reads = graph->refs + op->first_ref, *writes = reads + op->n_reads;
        site *s = &cut->sites[o];
        *s = (site){.price = INFINITY, .cost_ns = (double)op->cost_ns, .first_need = n_needs, .part = NONE};
        for (int32_t i = 0; i < op->n_writes; i++) {
            const tfg_cut_node *made = &graph->nodes[writes[i]];
            s->part = made->is_root ? s->part : 0;
            s->freed_bytes += !made->is_root && made->is_wanted ? (double)made->size_bytes : 0;
        }
        for (int32_t i = 0; i < op->n_reads; i++) {
            const tfg_cut_node *read = &graph->nodes[reads[i]];
            if (!read->is_root && !read->is_wanted && cut->makers[reads[i]] >= 0) {
                cut->needs[n_needs++] = cut->makers[reads[i]];
            }
        }
    }
    cut->sites[graph->n_ops].first_need = n_needs;
}

/* ---- one cut: Dinic ---------------------------------------------------------------------------------------------- */

typedef struct network {
    int32_t source;
    int32_t sink;
    double least; /* a capacity at or below this is none: what rounding leaves behind */
} network;

static void connect(tfg_cut *cut, int32_t from, int32_t to, double capacity) {
    const int32_t there = cut->n_arcs++, back = cut->n_arcs++;
    cut->arcs[there] = (arc){capacity, to, cut->vertices[from].first_arc};
    cut->vertices[from].first_arc = there;
    cut->arcs[back] = (arc){0, from, cut->vertices[to].first_arc};
    cut->vertices[to].first_arc = back;
}

/* The operators of `part` at this price: what gains hangs on the source, what costs on the sink. */
static network lay_network(tfg_cut *cut, stretch part, double price) {
    const int32_t n = part.end - part.begin;
    network net = {.source = n, .sink = n + 1};
    double all = 0;
    cut->n_arcs = 0;
    for (int32_t v = 0; v < n + 2; v++) {
        cut->vertices[v].first_arc = NONE;
    }
    for (int32_t v = 0; v < n; v++) {
        cut->sites[cut->order[part.begin + v]].vertex = v;
    }
    for (int32_t v = 0; v < n; v++) {
        const int32_t o = cut->order[part.begin + v];
        const site *s = &cut->sites[o];
        const double gain = price * s->freed_bytes - s->cost_ns;
        all += fabs(gain);
        if (gain > 0) {
            connect(cut, net.source, v, gain);
        } else if (gain < 0) {
            connect(cut, v, net.sink, -gain);
        }
        for (int32_t i = s->first_need; i < (s + 1)->first_need; i++) {
            const site *need = &cut->sites[cut->needs[i]];
            if (need->part == s->part) {
                connect(cut, v, need->vertex, INFINITY);
            }
        }
    }
    net.least = 1e-12 * all;
    return net;
}

/* Arcs from the source to every vertex that it still reaches; whether the sink is one. */
static bool find_levels(tfg_cut *cut, const network *net) {
    for (int32_t v = 0; v <= net->sink; v++) {
        cut->vertices[v].level = NONE;
        cut->vertices[v].next_arc = cut->vertices[v].first_arc;
    }
    int32_t n_queued = 0;
    cut->vertices[net->source].level = 0;
    cut->queue[n_queued++] = net->source;
    for (int32_t i = 0; i < n_queued; i++) {
        const vertex *from = &cut->vertices[cut->queue[i]];
        for (int32_t a = from->first_arc; a != NONE; a = cut->arcs[a].next) {
            vertex *to = &cut->vertices[cut->arcs[a].to];
            if (to->level == NONE && cut->arcs[a].capacity > net->least) {
                to->level = from->level + 1;
                cut->queue[n_queued++] = cut->arcs[a].to;
            }
        }
    }
    return cut->vertices[net->sink].level != NONE;
}

/* The next arc of v that leads one level on, or NONE: v is a dead end in this phase. */
static int32_t find_arc_on(tfg_cut *cut, const network *net, int32_t v) {
    vertex *from = &cut->vertices[v];
    for (; from->next_arc != NONE; from->next_arc = cut->arcs[from->next_arc].next) {
        const arc *a = &cut->arcs[from->next_arc];
        if (a->capacity > net->least && cut->vertices[a->to].level == from->level + 1) {
            break;
        }
    }
    return from->next_arc;
}

/* Sends what the narrowest arc of the path lets through; the path is cut back to before that arc. */
static int32_t send(tfg_cut *cut, int32_t n_path) {
    double flow = INFINITY;
    int32_t narrowest = 0;
    for (int32_t i = 0; i < n_path; i++) {
        if (cut->arcs[cut->path[i]].capacity < flow) {
            flow = cut->arcs[cut->path[i]].capacity;
            narrowest = i;
        }
    }
    for (int32_t i = 0; i < n_path; i++) {
        cut->arcs[cut->path[i]].capacity -= flow;
        cut->arcs[cut->path[i] ^ 1].capacity += flow;
    }
    cut->arcs[cut->path[narrowest]].capacity = 0;
    return narrowest;
}

static void fill_phase(tfg_cut *cut, const network *net) {
    int32_t n_path = 0;
    for (;;) {
        const int32_t here = n_path == 0 ? net->source : cut->arcs[cut->path[n_path - 1]].to;
        if (here == net->sink) {
            n_path = send(cut, n_path);
            continue;
        }
        const int32_t on = find_arc_on(cut, net, here);
        if (on != NONE) {
            cut->path[n_path++] = on;
        } else if (n_path == 0) {
            return;
        } else {
            cut->vertices[here].level = NONE;
            n_path--;
        }
    }
}

/* ---- parting ----------------------------------------------------------------------------------------------------- */

/* ns per byte of the whole part: at this price replaying all of it gains nothing and loses nothing. */
static double price_of(const tfg_cut *cut, stretch part) {
    double cost_ns = 0, freed_bytes = 0;
    for (int32_t i = part.begin; i < part.end; i++) {
        cost_ns += cut->sites[cut->order[i]].cost_ns;
        freed_bytes += cut->sites[cut->order[i]].freed_bytes;
    }
    return freed_bytes > 0 ? cost_ns / freed_bytes : INFINITY;
}

/* Moves what the source still reaches to the front; where the rest begins. */
static int32_t move_best_to_front(tfg_cut *cut, stretch part) {
    int32_t middle = part.begin, n_rest = 0;
    for (int32_t v = 0; v < part.end - part.begin; v++) {
        const int32_t o = cut->order[part.begin + v];
        if (cut->vertices[v].level != NONE) {
            cut->order[middle++] = o;
        } else {
            cut->parted[n_rest++] = o;
        }
    }
    memcpy(cut->order + middle, cut->parted, (size_t)n_rest * sizeof(int32_t));
    return middle;
}

static void name_part(tfg_cut *cut, stretch part) {
    cut->n_parts++;
    for (int32_t i = part.begin; i < part.end; i++) {
        cut->sites[cut->order[i]].part = cut->n_parts;
    }
}

/* Prices the whole part, or finds where it parts: the front is better than the whole at the whole's price. */
static int32_t price_or_part(tfg_cut *cut, stretch part) {
    const double price = price_of(cut, part);
    int32_t middle = part.begin;
    if (price < INFINITY && part.end - part.begin > 1) {
        const network net = lay_network(cut, part, price);
        while (find_levels(cut, &net)) {
            fill_phase(cut, &net);
        }
        middle = move_best_to_front(cut, part);
    }
    if (middle == part.begin || middle == part.end) {
        for (int32_t i = part.begin; i < part.end; i++) {
            cut->sites[cut->order[i]].price = price;
        }
        return part.end;
    }
    return middle;
}

static void price_sites(tfg_cut *cut, int32_t n_ops) {
    stretch whole = {0, 0};
    for (int32_t o = 0; o < n_ops; o++) {
        if (cut->sites[o].part != NONE) {
            cut->order[whole.end++] = o;
        }
    }
    int32_t n_todo = 0;
    cut->n_parts = 0;
    if (whole.end > 0) {
        cut->todo[n_todo++] = whole;
    }
    while (n_todo > 0) {
        const stretch part = cut->todo[--n_todo];
        const int32_t middle = price_or_part(cut, part);
        if (middle < part.end) {
            const stretch front = {part.begin, middle}, rest = {middle, part.end};
            name_part(cut, front);
            name_part(cut, rest);
            cut->todo[n_todo++] = rest;
            cut->todo[n_todo++] = front;
        }
    }
}

tfg_status tfg_cut_prices(tfg_cut *cut, const tfg_cut_graph *graph, double *out_price, tfg_error *err) {
    TFG_TRY(check_counts(graph, err));
    if (graph->n_nodes > 0 && out_price == NULL) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%d nodes, and nowhere to put their prices", graph->n_nodes);
    }
    TFG_TRY(reserve(cut, graph));
    TFG_TRY(take_graph(cut, graph, err));
    find_sites(cut, graph);
    price_sites(cut, graph->n_ops);
    for (int32_t n = 0; n < graph->n_nodes; n++) {
        const bool is_there = graph->nodes[n].is_root || cut->makers[n] < 0;
        out_price[n] = is_there ? INFINITY : cut->sites[cut->makers[n]].price;
    }
    return TFG_OK;
}
