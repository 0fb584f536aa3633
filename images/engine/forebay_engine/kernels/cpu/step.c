/* One step of a Llama-like transformer on a CPU: all layers in one call, for any mixture of prefill chunks and decode
 * tokens. library.py mirrors the structs and holds the addresses alive.
 *
 * The residual stream, q and every sum are float32; weights, what they multiply, K and V are `elem`. A row's numbers
 * depend on its sequence only: not on the rows beside it, on how a prompt is cut into chunks, or on the threads. */
#include "attention.h"
#include "team.h"

enum { PASS_ROWS = 512 }; /* rows that go through the layers together, which bounds the scratch memory */

typedef struct {
    matrix qkv, out, gate_up, down;
    const float *q_norm, *k_norm; /* [head_size], both or neither */
} layer;

typedef struct {
    long layers, hidden, heads, kv_heads;
    float hidden_eps, head_eps; /* what is added to a sum of squares: size * eps, since norm weights hold sqrt(size) */
    arena kv;
    const float *frequencies; /* [head_size / 2], radians a position */
    const layer *layer;
    matrix head;
} model;

typedef struct {
    long first, tokens, start; /* its rows in the step, and the position of the first */
    const int64_t *table;      /* block of each block_size positions */
} sequence;

typedef struct {
    const model *of;
    team *team;
    long hidden_stride, qkv_stride, out_stride, act_stride;
    float *x, *qkv, *turns; /* turns: cos, then sin, [PASS_ROWS, head_size] */
    elem *normed, *attended, *activations;
    attention_scratch *scratch; /* one a thread */
    /* the pass in progress */
    const sequence *sequences;
    long count, first, rows;
    float *hidden, *logits;
    long logits_stride;
} engine;

static void *memory(size_t size) {
    void *p = aligned_alloc(64, (size + 64) / 64 * 64);
    if (p) memset(p, 0, size);
    return p;
}

static float square_sum(const float *x, long size) {
    vf sum = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) sum += load(x + i) * load(x + i);
    float total = sum_lanes(sum);
    for (; i < size; i++) total += x[i] * x[i];
    return total;
}

static void norm_rows(engine *e, long part) {
    long hidden = e->of->hidden;
    for (long row = e->rows * part / e->team->size, end = e->rows * (part + 1) / e->team->size; row < end; row++) {
        const float *x = e->x + row * e->hidden_stride;
        elem *y = e->normed + row * e->hidden_stride;
        float by = 1.0f / sqrtf(square_sum(x, hidden) + e->of->hidden_eps);
        long i = 0;
        for (; i + LANES <= hidden; i += LANES) store_elems(y + i, load(x + i) * by);
        for (; i < hidden; i++) y[i] = narrow(x[i] * by);
    }
}

/* Norm over a head where the model has one, then rotary embedding (GPT-NeoX's halves, as Hugging Face). */
static void turn_head(const model *m, const float *norm, const float *turns, float *x) {
    long size = m->kv.head_size, half = size / 2;
    if (norm) {
        float by = 1.0f / sqrtf(square_sum(x, size) + m->head_eps);
        for (long i = 0; i < size; i++) x[i] = x[i] * by * norm[i];
    }
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], cos = turns[i], sin = turns[i + half];
        x[i] = a * cos - b * sin;
        x[i + half] = b * cos + a * sin;
    }
}

/* The part of a sequence that lies in the pass: its rows there, from `first`, and the position of that one. */
static sequence inside(const engine *e, long index) {
    sequence s = e->sequences[index];
    long first = s.first - e->first, end = first + s.tokens;
    long cut = first < 0 ? -first : 0;
    if (end > e->rows) end = e->rows;
    return (sequence){first + cut, end - first - cut, s.start + cut, s.table};
}

static void fill_turns(engine *e, long part) {
    long size = e->of->kv.head_size, half = size / 2, parts = e->team->size;
    for (long index = 0; index < e->count; index++) {
        sequence s = inside(e, index);
        for (long i = 0; i < s.tokens; i++) {
            long row = s.first + i;
            if (row % parts != part) continue;
            for (long j = 0; j < half; j++) {
                float angle = (float)(s.start + i) * e->of->frequencies[j];
                e->turns[row * size + j] = cosf(angle);
                e->turns[row * size + half + j] = sinf(angle);
            }
        }
    }
}

static void place_rows(engine *e, long number, long part) {
    const model *m = e->of;
    const layer *l = &m->layer[number];
    long size = m->kv.head_size;
    for (long index = 0; index < e->count; index++) {
        sequence s = inside(e, index);
        for (long i = 0; i < s.tokens; i++) {
            long row = s.first + i;
            if (row % e->team->size != part) continue;
            float *q = e->qkv + row * e->qkv_stride, *k = q + m->heads * size, *v = k + m->kv_heads * size;
            const float *turns = e->turns + row * size;
            for (long head = 0; head < m->heads; head++) turn_head(m, l->q_norm, turns, q + head * size);
            for (long head = 0; head < m->kv_heads; head++) {
                turn_head(m, l->k_norm, turns, k + head * size);
                elem *slot = slot_of(&m->kv, s.table, s.start + i, number, head);
                for (long j = 0; j < size; j++) {
                    slot[j] = narrow(k[head * size + j]);
                    slot[m->kv.value_offset + j] = narrow(v[head * size + j]);
                }
            }
        }
    }
}

static void attend_rows(engine *e, long number, long part) {
    const model *m = e->of;
    long group = m->heads / m->kv_heads, size = m->kv.head_size, most = QUERY_ROWS / group, item = 0;
    for (long index = 0; index < e->count; index++) {
        sequence s = inside(e, index);
        for (long first = 0; first < s.tokens; first += most)
            for (long head = 0; head < m->kv_heads; head++, item++) {
                if (item % e->team->size != part) continue;
                long end = first + most < s.tokens ? first + most : s.tokens;
                attend(&m->kv, s.table, number, head, group, e->qkv + s.first * e->qkv_stride + head * group * size,
                       e->qkv_stride, e->attended + s.first * e->out_stride + head * group * size, e->out_stride,
                       s.start, first, end, &e->scratch[part]);
            }
    }
}

static void pass(void *job, long part) {
    engine *e = job;
    const model *m = e->of;
    long parts = e->team->size, rows = e->rows;
    if (part == 0)
        for (long row = 0; row < rows; row++)
            memcpy(e->x + row * e->hidden_stride, e->hidden + (e->first + row) * m->hidden, m->hidden * sizeof(float));
    fill_turns(e, part);
    meet(e->team);
    for (long number = 0; number < m->layers; number++) {
        const layer *l = &m->layer[number];
        norm_rows(e, part);
        meet(e->team);
        multiply(&l->qkv, e->normed, e->hidden_stride, rows, PUT, e->qkv, 0, e->qkv_stride, part, parts);
        meet(e->team);
        place_rows(e, number, part);
        meet(e->team);
        attend_rows(e, number, part);
        meet(e->team);
        multiply(&l->out, e->attended, e->out_stride, rows, ADD, e->x, 0, e->hidden_stride, part, parts);
        meet(e->team);
        norm_rows(e, part);
        meet(e->team);
        multiply(&l->gate_up, e->normed, e->hidden_stride, rows, SWIGLU, 0, e->activations, e->act_stride, part, parts);
        meet(e->team);
        multiply(&l->down, e->activations, e->act_stride, rows, ADD, e->x, 0, e->hidden_stride, part, parts);
        meet(e->team);
    }
    if (part == 0)
        for (long row = 0; row < rows; row++)
            memcpy(e->hidden + (e->first + row) * m->hidden, e->x + row * e->hidden_stride, m->hidden * sizeof(float));
}

static void head_pass(void *job, long part) {
    engine *e = job;
    const model *m = e->of;
    if (part == 0)
        for (long row = 0; row < e->rows; row++)
            memcpy(e->x + row * e->hidden_stride, e->hidden + (e->first + row) * m->hidden, m->hidden * sizeof(float));
    meet(e->team);
    norm_rows(e, part);
    meet(e->team);
    multiply(&m->head, e->normed, e->hidden_stride, e->rows, PUT, e->logits + e->first * e->logits_stride, 0,
             e->logits_stride, part, e->team->size);
}

/* Outputs in a block of a packed matrix; gate and up take half of one each. */
long forebay_block(void) { return NB; }

/* `to` [blocks, inputs / STEP, NB, STEP] from the rows of `from` [outputs, columns]; what is beyond is zeros. */
void forebay_pack(const elem *from, long outputs, long columns, elem *to, long blocks, long inputs) {
    for (long block = 0; block < blocks; block++)
        for (long k = 0; k < inputs; k += STEP)
            for (long j = 0; j < NB; j++)
                for (long s = 0; s < STEP; s++) {
                    long row = block * NB + j;
                    *to++ = row < outputs && k + s < columns ? from[row * columns + k + s] : 0;
                }
}

/* The layers over `rows` rows of `count` sequences, which lie in order and without gaps: `hidden` [rows, hidden] is the
 * embedded tokens and becomes the hidden states before the final norm. */
void forebay_step(engine *e, float *hidden, long rows, const sequence *sequences, long count) {
    for (long first = 0; first < rows; first += PASS_ROWS) {
        long end = first + PASS_ROWS < rows ? first + PASS_ROWS : rows, begin = 0, after;
        while (sequences[begin].first + sequences[begin].tokens <= first) begin++;
        for (after = begin; after < count && sequences[after].first < end;) after++;
        e->sequences = sequences + begin;
        e->count = after - begin;
        e->first = first;
        e->rows = end - first;
        e->hidden = hidden;
        run_together(e->team, pass, e);
    }
}

/* `logits` [rows, stride] of `hidden` [rows, hidden]. */
void forebay_logits(engine *e, float *hidden, long rows, float *logits, long stride) {
    for (long first = 0; first < rows; first += PASS_ROWS) {
        e->first = first;
        e->rows = first + PASS_ROWS < rows ? PASS_ROWS : rows - first;
        e->hidden = hidden;
        e->logits = logits;
        e->logits_stride = stride;
        run_together(e->team, head_pass, e);
    }
}

void forebay_close(engine *e) {
    if (e->team) {
        for (long i = 0; e->scratch && i < e->team->size; i++) {
            attention_scratch *s = &e->scratch[i];
            free(s->queries), free(s->keys), free(s->values), free(s->weights);
            free(s->scores), free(s->sums), free(s->part);
        }
        disband(e->team);
    }
    free(e->x), free(e->qkv), free(e->turns), free(e->normed), free(e->attended), free(e->activations);
    free(e->scratch), free(e);
}

/* NULL when memory or threads can't be had. `of` and what it points to must outlive it. One caller at a time. */
engine *forebay_open(const model *of, long threads) {
    engine *e = calloc(1, sizeof *e);
    if (!e) return 0;
    long size = of->kv.head_size, padded = (size + NB - 1) / NB * NB;
    e->of = of;
    e->team = gather(threads);
    e->hidden_stride = of->layer->out.blocks * NB;
    e->qkv_stride = of->layer->qkv.blocks * NB;
    e->out_stride = of->layer->out.inputs;
    e->act_stride = of->layer->down.inputs;
    e->x = memory(PASS_ROWS * e->hidden_stride * sizeof(float));
    e->qkv = memory(PASS_ROWS * e->qkv_stride * sizeof(float));
    e->turns = memory(PASS_ROWS * size * sizeof(float));
    e->normed = memory(PASS_ROWS * e->hidden_stride * sizeof(elem));
    e->attended = memory(PASS_ROWS * e->out_stride * sizeof(elem));
    e->activations = memory(PASS_ROWS * e->act_stride * sizeof(elem));
    e->scratch = memory(threads * sizeof *e->scratch);
    int whole = e->team && e->x && e->qkv && e->turns && e->normed && e->attended && e->activations && e->scratch;
    for (long i = 0; whole && i < threads; i++) {
        attention_scratch *s = &e->scratch[i];
        s->queries = memory(QUERY_ROWS * size * sizeof(elem));
        s->keys = memory(KEYS * size * sizeof(elem));
        s->values = memory(KEYS * padded * sizeof(elem));
        s->weights = memory(TILE_ROWS * KEYS * sizeof(elem));
        s->scores = memory(TILE_ROWS * KEYS * sizeof(float));
        s->sums = memory(QUERY_ROWS * padded * sizeof(float));
        s->part = memory(TILE_ROWS * NB * sizeof(float));
        whole = s->queries && s->keys && s->values && s->weights && s->scores && s->sums && s->part;
    }
    if (whole) return e;
    forebay_close(e);
    return 0;
}
