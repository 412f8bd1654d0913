/* The native engine's forward pass: a decoder of the Qwen3 / Qwen2 / Llama family over packed weights, one call a step.
 *
 * A call takes N tokens, each with its slot of the cache and its position, and so serves decode steps (one token a
 * slot), prefill (many tokens of one slot) and any mixture without padding. All threads walk the same phases and meet
 * at barriers between them; a phase's work is split by rows of matrices, by tokens, or by heads. Sums of a token run in
 * one order whatever shares the call with it (NF4: in calls of up to 16 tokens in one order, in longer ones in another).
 *
 * The residual stream, norms, softmax and logits are fp32; inputs of products and the cache are bf16 (fp32 inputs
 * without the machine's bf16 unit). The ids with the best logits are multiplied again in fp32 before one is chosen.
 *
 * Legend: N tokens, W wanted tokens (those that get logits), D hidden, I intermediate, H query heads, G key/value heads,
 * E head width, S positions of a slot, T threads, r rank of the adapter.
 */
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels.h"

typedef struct {
    Matrix q, k, v, o, gate, up, down;
    const float *attention_norm, *mlp_norm; /* [D] */
    const float *q_norm, *k_norm;           /* [E] or NULL */
} Layer;

typedef struct {
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, num_ids;
    float eps, attention_scale;
    const Layer *layer;
    Matrix embedding, head;
    const float *final_norm; /* [D] */
    const float *cos, *sin;  /* [context, E / 2] */
} Model;

typedef struct {
    uint16_t *keys, *values; /* bf16 [layers, slots, G, S, E] */
    int32_t slots, length;   /* S */
} Cache;

enum { CANDIDATES = 8 };

typedef struct { /* what a call needs, allocated once */
    int32_t threads, max_tokens;
    float *residual, *q, *k, *v, *attended, *gate, *up, *out, *hidden, *logits; /* [N, ..]; hidden, logits: [W, ..] */
    float *low_rank;                                                            /* [3, N, r]: A x of up to 3 matrices */
    Input normed, mixed, middle, final;
    Input *alone;          /* [T]: the input of the next products, where each thread makes its own */
    Input *low_rank_input; /* one a thread */
    float **row;           /* one a thread: scores, rows of activations, B (A x) */
    void **decoded;        /* one a thread: decoded rows */
    float *best_value;     /* [T, W, CANDIDATES] */
    int32_t *best_id;
#if BF16_UNIT
    Fixed fixed;
#endif
} Scratch;

/* ---------------------------------------------------------------------------- threads */

typedef struct {
    atomic_int waiting, turn;
    int threads;
} Barrier;

/* Spins: phases take 5 to 500 us, and waking a sleeping thread takes 50. Gives the core away after a while, so that a
 * machine with other work on it still makes progress. */
static void meet(Barrier *b) {
    if (b->threads == 1) return;
    int turn = atomic_load_explicit(&b->turn, memory_order_relaxed);
    if (atomic_fetch_add(&b->waiting, 1) == b->threads - 1) {
        atomic_store_explicit(&b->waiting, 0, memory_order_relaxed);
        atomic_store_explicit(&b->turn, turn + 1, memory_order_release);
        return;
    }
    for (long spins = 0; atomic_load_explicit(&b->turn, memory_order_acquire) == turn; spins++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (spins > 2000) sched_yield();
    }
}

typedef struct {
    int id, threads;
    Barrier *barrier;
} Thread;

/* this thread's share [*from, *to) of `count`, in units of `unit` */
static void share(Thread t, int count, int unit, int *from, int *to) {
    int units = (count + unit - 1) / unit, each = units / t.threads, more = units % t.threads;
    int first = t.id * each + (t.id < more ? t.id : more), last = first + each + (t.id < more);
    *from = first * unit < count ? first * unit : count;
    *to = last * unit < count ? last * unit : count;
}

/* ---------------------------------------------------------------------------- products */

/* This thread's rows of y [N, w->rows] = x W^T (+ bias), and its rows of A x for the adapter */
static void multiply(Thread t, const Matrix *w, const Input *x, int tokens, float *y, float *low_rank, Scratch *s) {
    int r0, r1;
    share(t, w->rows, 16, &r0, &r1);
    if (w->kind == NF4)
        nf4_rows(w, x, tokens, r0, r1, y + r0, w->rows, s->decoded[t.id]);
    else
        dense_rows((const uint16_t *)w->codes + (size_t)r0 * w->cols, w->cols, w->cols, x, tokens, r0, r1, y + r0, w->rows);
    if (w->bias)
        for (int n = 0; n < tokens; n++)
            for (int r = r0; r < r1; r++) y[(size_t)n * w->rows + r] += w->bias[r];
    if (w->lora_a) {
        share(t, w->rank, 4, &r0, &r1);
        const size_t width = padded(w->cols);
        dense_rows(w->lora_a + r0 * width, width, (int)width, x, tokens, r0, r1, low_rank + r0, w->rank);
    }
}

/* y[:, r0:r1] += s B (A x), after a barrier behind `multiply` */
static void add_low_rank(Thread t, const Matrix *w, int tokens, float *y, const float *low_rank, int r0, int r1, Scratch *s) {
    if (!w->lora_a || r0 >= r1) return;
    Input *x = &s->low_rank_input[t.id];
    for (int n = 0; n < tokens; n++) store_input(x, n, low_rank + (size_t)n * w->rank, w->rank, BF16);
    enum { STEP = 256 };
    float *piece = s->row[t.id]; /* [N, 256] */
    for (int r = r0; r < r1; r += STEP) {
        const int end = r + STEP < r1 ? r + STEP : r1;
        dense_rows(w->lora_b + (size_t)r * w->rank, w->rank, w->rank, x, tokens, r, end, piece, STEP);
        for (int n = 0; n < tokens; n++)
            for (int i = r; i < end; i++) y[(size_t)n * w->rows + i] += w->lora_scale * piece[(size_t)n * STEP + i - r];
    }
}

/* ---------------------------------------------------------------------------- norms, rotation, attention */

static float root_mean_square(const float *x, int count, float eps) {
    float sum[16] = {0};
    for (int k = 0; k + 16 <= count; k += 16)
        for (int i = 0; i < 16; i++) sum[i] += x[k + i] * x[k + i];
    for (int k = count / 16 * 16; k < count; k++) sum[0] += x[k] * x[k];
    float total = 0;
    for (int i = 0; i < 16; i++) total += sum[i];
    return 1.0f / sqrtf(total / (float)count + eps);
}

static void rms_norm(const float *x, const float *weight, int count, float eps, float *out) {
    const float factor = root_mean_square(x, count, eps);
    for (int k = 0; k < count; k++) out[k] = x[k] * factor * weight[k];
}

/* one head of one token, in place: norm (Qwen3), then rotation by halves */
static void norm_and_rotate(float *x, const float *weight, const Model *m, int position) {
    const int half = m->head_dim / 2;
    if (weight) rms_norm(x, weight, m->head_dim, m->eps, x);
    const float *cos = m->cos + (size_t)position * half, *sin = m->sin + (size_t)position * half;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

#if BF16_UNIT
/* e^x for x <= 0: 2^n * p(f), f in [-ln 2 / 2, ln 2 / 2]; p is the Taylor sum to f^6, good to 1e-7 */
static inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    f = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), f);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}
#endif

/* scores[j] = scale * q . keys[j], and their softmax not yet divided -> the divisor */
static float attention_weights(const float *q, const uint16_t *keys, int count, int width, float scale, float *scores) {
    float top = -1e30f;
    int j = 0;
#if BF16_UNIT
    uint16_t half[width];
    for (int i = 0; i < width; i++) half[i] = to_bf16(q[i]);
    for (; width % 32 == 0 && j + 4 <= count; j += 4) {
        __m512 sum[4];
        for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_ps();
        for (int e = 0; e < width; e += 32) {
            __m512i value = _mm512_loadu_si512(half + e);
            for (int i = 0; i < 4; i++) sum[i] = dot(sum[i], value, _mm512_loadu_si512(keys + (size_t)(j + i) * width + e));
        }
        _mm_storeu_ps(scores + j, _mm_mul_ps(sum4(sum[0], sum[1], sum[2], sum[3]), _mm_set1_ps(scale)));
    }
#else
    for (; width % LANES == 0 && j + 4 <= count; j += 4) {
        Vec sum[4] = {{0}};
        for (int e = 0; e < width; e += LANES) {
            const Vec value = load(q + e);
            for (int i = 0; i < 4; i++) sum[i] += value * widen(keys + (size_t)(j + i) * width + e);
        }
        sum4(sum, scores + j);
        for (int i = 0; i < 4; i++) scores[j + i] *= scale;
    }
#endif
    for (; j < count; j++) {
        float sum = 0;
        for (int i = 0; i < width; i++) sum += q[i] * from_bf16(keys[(size_t)j * width + i]);
        scores[j] = sum * scale;
    }
    float total = 0;
    j = 0;
#if BF16_UNIT
    __m512 sum = _mm512_setzero_ps(), high = _mm512_set1_ps(top);
    for (; j + 16 <= count; j += 16) high = _mm512_max_ps(high, _mm512_loadu_ps(scores + j));
    top = _mm512_reduce_max_ps(high);
#endif
    for (; j < count; j++) top = scores[j] > top ? scores[j] : top;
    j = 0;
#if BF16_UNIT
    high = _mm512_set1_ps(top);
    for (; j + 16 <= count; j += 16) {
        __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + j), high));
        _mm512_storeu_ps(scores + j, e);
        sum = _mm512_add_ps(sum, e);
    }
    total = _mm512_reduce_add_ps(sum);
#else
    Vec sum[4] = {{0}};
    for (; j + LANES <= count; j += LANES) {
        const Vec e = exp_of(load(scores + j) - top);
        store(scores + j, e);
        sum[0] += e;
    }
    float parts[4];
    sum4(sum, parts);
    total = parts[0];
#endif
    for (; j < count; j++) total += scores[j] = expf(scores[j] - top);
    return total;
}

/* out = sum_j weights[j] * values[j] / total */
static void attention_sum(const float *weights, float total, const uint16_t *values, int count, int width, float *out) {
    int e = 0;
#if BF16_UNIT
    for (; e + 64 <= width; e += 64) {
        __m512 sum[4];
        for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_ps();
        for (int j = 0; j < count; j++) {
            const __m512 weight = _mm512_set1_ps(weights[j]);
            for (int i = 0; i < 4; i++) {
                __m256i half = _mm256_loadu_si256((const void *)(values + (size_t)j * width + e + 16 * i));
                sum[i] = _mm512_fmadd_ps(weight, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)), sum[i]);
            }
        }
        for (int i = 0; i < 4; i++) _mm512_storeu_ps(out + e + 16 * i, _mm512_mul_ps(sum[i], _mm512_set1_ps(1 / total)));
    }
#else
    for (; e + 4 * LANES <= width; e += 4 * LANES) {
        Vec sum[4] = {{0}};
        for (int j = 0; j < count; j++)
            for (int i = 0; i < 4; i++) sum[i] += weights[j] * widen(values + (size_t)j * width + e + LANES * i);
        for (int i = 0; i < 4; i++) store(out + e + LANES * i, sum[i] / total);
    }
#endif
    if (e == width) return;
    for (int i = e; i < width; i++) out[i] = 0;
    for (int j = 0; j < count; j++)
        for (int i = e; i < width; i++) out[i] += weights[j] * from_bf16(values[(size_t)j * width + i]);
    for (int i = e; i < width; i++) out[i] /= total;
}

/* ---------------------------------------------------------------------------- one block */

typedef struct {
    const Model *model;
    const Cache *cache;
    Scratch *scratch;
    const int32_t *tokens, *slots, *positions, *wanted, *rows, *own, *own_start;
    int32_t count, wanted_count, row_count; /* row_count 0: no logits are asked for */
    int32_t *ids;                           /* [W] */
    float *gaps, *hidden;                   /* [W], [W, D] or NULL */
    int32_t top_k, *top_ids;                /* [W, K]; top_k 0: no lists */
    float *top_values, *tails;              /* [W, K], [W]: log-probabilities */
} Call;

/* Up to this many tokens each thread makes the inputs of products for itself: a token's norm takes 0.3 us, and a barrier
 * with its waiting 2 us, four times a layer. */
enum { ALONE = 4 };

/* the tokens whose inputs this thread makes, and where: shared or `alone` */
static Input *input_tokens(Thread t, const Call *c, Input *shared, int cols, int *n0, int *n1) {
    if (c->count > ALONE) {
        share(t, c->count, 1, n0, n1);
        return shared;
    }
    Input *own = c->scratch->alone + t.id;
    *n0 = 0, *n1 = c->count, own->width = padded(cols);
    return own;
}

/* The norm of the residual stream as input of products; shared ones are complete behind a barrier, made here. */
static const Input *norm_tokens(Thread t, const Call *c, const float *weight, int kind) {
    const Model *m = c->model;
    int n0, n1;
    Input *to = input_tokens(t, c, &c->scratch->normed, m->hidden, &n0, &n1);
    for (int n = n0; n < n1; n++) {
        float *row = c->scratch->row[t.id];
        rms_norm(c->scratch->residual + (size_t)n * m->hidden, weight, m->hidden, m->eps, row);
        store_input(to, n, row, m->hidden, kind);
    }
    if (c->count > ALONE) meet(t.barrier);
    return to;
}

/* rotated keys and values of this call's tokens into the cache, rotated queries in place; split by heads */
static void prepare_heads(Thread t, const Call *c, const Layer *layer, int index) {
    const Model *m = c->model;
    Scratch *s = c->scratch;
    const int E = m->head_dim, G = m->kv_heads, N = c->count;
    int h0, h1;
    share(t, m->heads, 1, &h0, &h1);
    add_low_rank(t, &layer->q, N, s->q, s->low_rank, h0 * E, h1 * E, s);
    for (int n = 0; n < N; n++)
        for (int h = h0; h < h1; h++)
            norm_and_rotate(s->q + ((size_t)n * m->heads + h) * E, layer->q_norm, m, c->positions[n]);
    const size_t stride = (size_t)s->max_tokens * layer->q.rank;
    share(t, G, 1, &h0, &h1);
    add_low_rank(t, &layer->k, N, s->k, s->low_rank + stride, h0 * E, h1 * E, s);
    add_low_rank(t, &layer->v, N, s->v, s->low_rank + 2 * stride, h0 * E, h1 * E, s);
    for (int n = 0; n < N; n++)
        for (int h = h0; h < h1; h++) {
            float *key = s->k + ((size_t)n * G + h) * E, *value = s->v + ((size_t)n * G + h) * E;
            norm_and_rotate(key, layer->k_norm, m, c->positions[n]);
            const size_t at =
                ((((size_t)index * c->cache->slots + c->slots[n]) * G + h) * c->cache->length + c->positions[n]) * E;
            for (int i = 0; i < E; i++) {
                c->cache->keys[at + i] = to_bf16(key[i]);
                c->cache->values[at + i] = to_bf16(value[i]);
            }
        }
}

/* Each query head of each token sees its slot's positions up to its own. With few tokens the heads are dealt out, else
 * whole tokens: the heads of a group then find their keys and values in this core's cache. */
static void attend(Thread t, const Call *c, int index) {
    const Model *m = c->model;
    Scratch *s = c->scratch;
    const int E = m->head_dim, N = c->count, H = m->heads, group = H / m->kv_heads;
    const int by_token = N >= 4 * t.threads;
    for (int item = 0; item < N * H; item++) {
        const int h = item % H, n = item / H;
        if ((by_token ? n : item) % t.threads != t.id) continue;
        const size_t at = (((size_t)index * c->cache->slots + c->slots[n]) * m->kv_heads + h / group) * c->cache->length * E;
        const int seen = c->positions[n] + 1;
        const float *q = s->q + ((size_t)n * m->heads + h) * E;
        float total = attention_weights(q, c->cache->keys + at, seen, E, m->attention_scale, s->row[t.id]);
        attention_sum(s->row[t.id], total, c->cache->values + at, seen, E, s->attended + ((size_t)n * m->heads + h) * E);
    }
}

/* residual += out (+ adapter), split by columns */
static void add_to_residual(Thread t, const Call *c, const Matrix *w) {
    Scratch *s = c->scratch;
    int r0, r1;
    share(t, w->rows, 16, &r0, &r1);
    add_low_rank(t, w, c->count, s->out, s->low_rank, r0, r1, s);
    for (int n = 0; n < c->count; n++)
        for (int r = r0; r < r1; r++) s->residual[(size_t)n * w->rows + r] += s->out[(size_t)n * w->rows + r];
}

/* gate = silu(gate) * up, split by columns */
static void activate(Thread t, const Call *c, const Layer *layer) {
    Scratch *s = c->scratch;
    const int I = c->model->intermediate;
    int r0, r1;
    share(t, I, 16, &r0, &r1);
    const size_t stride = (size_t)s->max_tokens * layer->gate.rank;
    add_low_rank(t, &layer->gate, c->count, s->gate, s->low_rank, r0, r1, s);
    add_low_rank(t, &layer->up, c->count, s->up, s->low_rank + stride, r0, r1, s);
    for (int n = 0; n < c->count; n++) {
        float *gate = s->gate + (size_t)n * I;
        const float *up = s->up + (size_t)n * I;
        int r = r0;
#if BF16_UNIT
        for (; r + 16 <= r1; r += 16) { /* x / (1 + e^-x) = x * e^-|x| or 1, over 1 + e^-|x|: never above 1 */
            __m512 x = _mm512_loadu_ps(gate + r);
            __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
            __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
            __m512 top = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), negative, e);
            __m512 silu = _mm512_div_ps(_mm512_mul_ps(x, top), _mm512_add_ps(_mm512_set1_ps(1.0f), e));
            _mm512_storeu_ps(gate + r, _mm512_mul_ps(silu, _mm512_loadu_ps(up + r)));
        }
#else
        for (; r + LANES <= r1; r += LANES) {
            const Vec x = load(gate + r), e = exp_of((Vec)((VecInt)x | INT32_MIN)); /* e^-|x| */
            store(gate + r, x * choose_by(x < 0, e, all_of(1.0f)) / (1.0f + e) * load(up + r));
        }
#endif
        for (; r < r1; r++) gate[r] = gate[r] / (1.0f + expf(-gate[r])) * up[r];
    }
}

/* rows of [N, cols] as input of `reader`; else as above */
static const Input *store_tokens(Thread t, const Call *c, const float *from, Input *shared, const Matrix *reader) {
    const int cols = reader->cols;
    int n0, n1;
    Input *to = input_tokens(t, c, shared, cols, &n0, &n1);
    for (int n = n0; n < n1; n++) store_input(to, n, from + (size_t)n * cols, cols, reader->kind);
    if (c->count > ALONE) meet(t.barrier);
    return to;
}

static void block(Thread t, const Call *c, int index) {
    const Layer *layer = c->model->layer + index;
    Scratch *s = c->scratch;
    const int N = c->count;
    const Input *x = norm_tokens(t, c, layer->attention_norm, layer->q.kind);
    size_t stride = (size_t)s->max_tokens * layer->q.rank;
    multiply(t, &layer->q, x, N, s->q, s->low_rank, s);
    multiply(t, &layer->k, x, N, s->k, s->low_rank + stride, s);
    multiply(t, &layer->v, x, N, s->v, s->low_rank + 2 * stride, s);
    meet(t.barrier);
    prepare_heads(t, c, layer, index);
    meet(t.barrier);
    attend(t, c, index);
    meet(t.barrier);
    x = store_tokens(t, c, s->attended, &s->mixed, &layer->o);
    multiply(t, &layer->o, x, N, s->out, s->low_rank, s);
    meet(t.barrier);
    add_to_residual(t, c, &layer->o);
    meet(t.barrier);
    x = norm_tokens(t, c, layer->mlp_norm, layer->gate.kind);
    stride = (size_t)s->max_tokens * layer->gate.rank;
    multiply(t, &layer->gate, x, N, s->gate, s->low_rank, s);
    multiply(t, &layer->up, x, N, s->up, s->low_rank + stride, s);
    meet(t.barrier);
    activate(t, c, layer);
    meet(t.barrier);
    x = store_tokens(t, c, s->gate, &s->middle, &layer->down);
    multiply(t, &layer->down, x, N, s->out, s->low_rank, s);
    meet(t.barrier);
    add_to_residual(t, c, &layer->down);
    meet(t.barrier);
}

/* ---------------------------------------------------------------------------- first and last layer */

static void embed(Thread t, const Call *c) {
    const Matrix *w = &c->model->embedding;
    const int D = w->cols;
    int n0, n1;
    share(t, c->count, 1, &n0, &n1);
    for (int n = n0; n < n1; n++) {
        float *to = c->scratch->residual + (size_t)n * D;
        const size_t at = (size_t)c->tokens[n] * D;
        if (w->kind == INT8) {
            const float scale = from_bf16(w->scales[c->tokens[n]]);
            for (int k = 0; k < D; k++) to[k] = (float)(int8_t)w->codes[at + k] * scale;
        } else
            for (int k = 0; k < D; k++) to[k] = from_bf16(((const uint16_t *)w->codes)[at + k]);
    }
}

/* into a list of `size`, sorted down; behind an equal value, so that rising ids keep the lower one first */
static void keep_best(float value, int32_t id, int size, float *values, int32_t *ids) {
    int at = size - 1;
    for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = value, ids[at] = id;
}

/* the `size` largest of logits [count]; the id of logits[r] is rows[r], or first + r */
static void find_best(const float *logits, int count, const int32_t *rows, int first, int size, float *values, int32_t *ids) {
    for (int i = 0; i < size; i++) values[i] = -INFINITY, ids[i] = -1;
    int r = 0;
#if BF16_UNIT
    for (; r + 16 <= count; r += 16) {
        __mmask16 above = _mm512_cmp_ps_mask(_mm512_loadu_ps(logits + r), _mm512_set1_ps(values[size - 1]), _CMP_GT_OQ);
        for (; above; above &= (__mmask16)(above - 1)) {
            const int at = r + __builtin_ctz(above);
            if (logits[at] > values[size - 1]) keep_best(logits[at], rows ? rows[at] : first + at, size, values, ids);
        }
    }
#else
    for (; r + LANES <= count; r += LANES)
        for (int at = r; at < r + LANES && any_of(load(logits + r) > all_of(values[size - 1])); at++)
            if (logits[at] > values[size - 1]) keep_best(logits[at], rows ? rows[at] : first + at, size, values, ids);
#endif
    for (; r < count; r++)
        if (logits[r] > values[size - 1]) keep_best(logits[r], rows ? rows[r] : first + r, size, values, ids);
}

/* The K best of logits [count] as log-probabilities, sorted down, and the log of the remaining mass. The tail is summed
 * over the other ids, not taken as 1 less the K: that difference of numbers near 1 has no digits left for a tail of
 * 1e-8. So the K best are taken out of the sum one by one. */
static void log_probabilities(float *logits, int count, const int32_t *rows, int K, int32_t *ids, float *values, float *tail) {
    find_best(logits, count, rows, 0, K, values, ids);
    const float top = values[0];
    double best = 0, rest = 0;
    for (int i = 0; i < K && ids[i] >= 0; i++) best += exp((double)(values[i] - top));
    const float least = values[K - 1];
    int r = 0, left = 0; /* left: ids whose logit equals the K-th, of which some are among the K */
    for (int i = 0; i < K; i++) left += values[i] == least;
#if BF16_UNIT
    __m512 sum = _mm512_setzero_ps(), high = _mm512_set1_ps(top), limit = _mm512_set1_ps(least);
    for (; r + 16 <= count; r += 16) {
        const __m512 x = _mm512_loadu_ps(logits + r);
        sum = _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(x, limit, _CMP_LE_OQ), sum, exp16(_mm512_sub_ps(x, high)));
    }
    rest = _mm512_reduce_add_ps(sum);
#else
    Vec sum[4] = {{0}};
    for (; r + LANES <= count; r += LANES) {
        const Vec x = load(logits + r);
        sum[0] += choose_by(x <= least, exp_of(x - top), (Vec){});
    }
    float parts[4];
    sum4(sum, parts);
    rest = parts[0];
#endif
    for (; r < count; r++)
        if (logits[r] <= least) rest += exp((double)(logits[r] - top));
    rest -= left * exp((double)(least - top));
    if (!(rest > 1e-30)) rest = 1e-30;
    const double total = log(best + rest);
    for (int i = 0; i < K; i++) values[i] = (float)(values[i] - top - total);
    *tail = (float)(log(rest) - total);
}

static float exact_logit(const Matrix *w, int id, const float *x) {
    const size_t at = (size_t)id * w->cols;
    float sum[16] = {0};
    for (int k = 0; k < w->cols; k++) {
        float value = w->kind == INT8 ? (float)(int8_t)w->codes[at + k] : from_bf16(((const uint16_t *)w->codes)[at + k]);
        sum[k & 15] += value * x[k];
    }
    float total = 0;
    for (int i = 0; i < 16; i++) total += sum[i];
    return w->kind == INT8 ? total * from_bf16(w->scales[id]) : total;
}

/* the logit of one id for one wanted token, as the rows of the table give it */
static float one_logit(const Model *m, const Scratch *s, int32_t id, int n) {
    const uint16_t *row = (const uint16_t *)m->head.codes + (size_t)id * m->hidden;
    float out;
    const Input one = input_of(&s->final, n);
#if BF16_UNIT
    const size_t at = (size_t)n * s->fixed.width;
    const Fixed fixed = {s->fixed.high + at, s->fixed.low + at, s->fixed.step + n, s->fixed.offset + n, s->fixed.width};
    if (m->head.kind == INT8)
        int8_rows(&m->head, &id, 0, 1, &fixed, 1, &out, 0);
#else
    if (m->head.kind == INT8)
        int8_rows(&m->head, &id, 0, 1, &one, 1, &out, 0);
#endif
    else
        dense_rows(row, m->hidden, m->hidden, &one, 1, 0, 1, &out, 1);
    return out;
}

static void choose(Thread t, const Call *c) {
    const Model *m = c->model;
    Scratch *s = c->scratch;
    const int W = c->wanted_count, D = m->hidden;
    int n0, n1, r0, r1;
    share(t, W, 1, &n0, &n1);
    for (int n = n0; n < n1; n++) {
        float *hidden = s->hidden + (size_t)n * D;
        rms_norm(s->residual + (size_t)c->wanted[n] * D, m->final_norm, D, m->eps, hidden);
        if (c->hidden) memcpy(c->hidden + (size_t)n * D, hidden, sizeof(float) * (size_t)D);
#if BF16_UNIT
        if (m->head.kind == INT8) store_fixed(&s->fixed, n, hidden, D);
#endif
        store_input(&s->final, n, hidden, D, m->head.kind);
    }
    if (c->row_count == 0 || W == 0) return;
    meet(t.barrier);
    share(t, c->row_count, 16, &r0, &r1);
    float *logits = s->logits;
    const int ld = m->num_ids;
#if BF16_UNIT
    const Fixed *input = &s->fixed;
#else
    const Input *input = &s->final;
#endif
    if (m->head.kind == INT8)
        int8_rows(&m->head, c->rows ? c->rows + r0 : NULL, r0, r1 - r0, input, W, logits + r0, ld);
    else if (c->rows == NULL)
        dense_rows((const uint16_t *)m->head.codes + (size_t)r0 * D, D, D, &s->final, W, r0, r1, logits + r0, ld);
    else
        for (int r = r0; r < r1; r++) {
            const uint16_t *row = (const uint16_t *)m->head.codes + (size_t)c->rows[r] * D;
            dense_rows(row, D, D, &s->final, W, 0, 1, logits + r, ld);
        }
    if (c->top_k) {
        meet(t.barrier);
        for (int n = n0; n < n1; n++) {
            const size_t at = (size_t)n * c->top_k;
            float *row = logits + (size_t)n * ld;
            log_probabilities(row, c->row_count, c->rows, c->top_k, c->top_ids + at, c->top_values + at, c->tails + n);
            c->ids[n] = c->top_ids[at];
            c->gaps[n] = c->top_k > 1 ? c->top_values[at] - c->top_values[at + 1] : INFINITY;
        }
        return;
    }
    for (int n = 0; n < W; n++) {
        const size_t at = ((size_t)t.id * s->max_tokens + n) * CANDIDATES;
        find_best(logits + (size_t)n * ld + r0, r1 - r0, c->rows ? c->rows + r0 : NULL, r0, CANDIDATES,
                  s->best_value + at, s->best_id + at);
        for (int i = c->own ? c->own_start[n] + t.id : 0; c->own && i < c->own_start[n + 1]; i += t.threads) {
            const float value = one_logit(m, s, c->own[i], n);
            if (value > s->best_value[at + CANDIDATES - 1])
                keep_best(value, c->own[i], CANDIDATES, s->best_value + at, s->best_id + at);
        }
    }
    meet(t.barrier);
    for (int n = n0; n < n1; n++) {
        float values[CANDIDATES];
        int32_t ids[CANDIDATES];
        for (int i = 0; i < CANDIDATES; i++) values[i] = -INFINITY, ids[i] = -1;
        for (int id = 0; id < t.threads; id++)
            for (int i = 0; i < CANDIDATES; i++) {
                const size_t at = ((size_t)id * s->max_tokens + n) * CANDIDATES + i;
                if (s->best_value[at] > values[CANDIDATES - 1]) 
                    keep_best(s->best_value[at], s->best_id[at], CANDIDATES, values, ids);
            }
        float first = -INFINITY, second = -INFINITY;
        for (int i = 0; i < CANDIDATES && ids[i] >= 0; i++) {
            const float value = exact_logit(&m->head, ids[i], s->hidden + (size_t)n * D);
            if (value > first || (value == first && ids[i] < c->ids[n])) {
                second = first, first = value, c->ids[n] = ids[i];
            } else if (value > second)
                second = value;
        }
        c->gaps[n] = first - second;
    }
}

/* ---------------------------------------------------------------------------- what is called from outside */

int engine_unit(void) { return BF16_UNIT; }

void engine_order_row(const uint16_t *from, uint16_t *to, int cols, int kind) {
    order_row(from, to, cols, kind);
}

/* logits of the last call: [W, ld], for tests */
const float *engine_logits(const Scratch *s) { return s->logits; }

void engine_free(Scratch *s) {
    if (!s) return;
    float *all[] = {s->residual, s->q, s->k, s->v, s->attended, s->gate, s->up, s->out, s->hidden, s->logits, s->low_rank};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    Input *inputs[] = {&s->normed, &s->mixed, &s->middle, &s->final};
    for (int i = 0; i < 4; i++) free_input(inputs[i]);
    for (int i = 0; s->row && s->decoded && s->low_rank_input && s->alone && i < s->threads; i++) {
        free(s->row[i]), free(s->decoded[i]), free_input(&s->low_rank_input[i]), free_input(&s->alone[i]);
    }
    free(s->row), free(s->decoded), free(s->low_rank_input), free(s->alone), free(s->best_value), free(s->best_id);
#if BF16_UNIT
    free(s->fixed.high), free(s->fixed.low), free(s->fixed.step), free(s->fixed.offset);
#endif
    free(s);
}

Scratch *engine_new(const Model *m, int threads, int max_tokens, int positions, int rank) {
    Scratch *s = zeros(1, sizeof *s);
    if (!s) return NULL;
    const size_t N = max_tokens, W = N, D = m->hidden, I = m->intermediate;
    const int att = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    int widest = att > m->intermediate ? att : m->intermediate;
    widest = widest > m->hidden ? widest : m->hidden;
    size_t row = positions > widest ? (size_t)positions : (size_t)widest;
    row = row > N * 256 ? row : N * 256;
    s->threads = threads, s->max_tokens = max_tokens;
    s->residual = zeros(N * D, 4), s->out = zeros(N * D, 4), s->q = zeros(N * att, 4), s->attended = zeros(N * att, 4);
    s->k = zeros(N * kv, 4), s->v = zeros(N * kv, 4), s->gate = zeros(N * I, 4), s->up = zeros(N * I, 4);
    s->hidden = zeros(W * D, 4), s->logits = malloc(W * m->num_ids * sizeof(float)); /* pages only as they are used */
    s->low_rank = zeros(3 * N * (rank + 1), 4);
    s->normed = new_input(max_tokens, m->hidden), s->mixed = new_input(max_tokens, att);
    s->middle = new_input(max_tokens, m->intermediate), s->final = new_input(max_tokens, m->hidden);
    s->low_rank_input = zeros(threads, sizeof(Input)), s->row = zeros(threads, sizeof(float *));
    s->decoded = zeros(threads, sizeof(void *)), s->alone = zeros(threads, sizeof(Input));
    s->best_value = zeros((size_t)threads * W * CANDIDATES, 4), s->best_id = zeros((size_t)threads * W * CANDIDATES, 4);
    int whole = s->residual && s->out && s->q && s->attended && s->k && s->v && s->gate && s->up && s->hidden && s->logits &&
                s->low_rank && s->low_rank_input && s->row && s->decoded && s->best_value && s->best_id && s->alone;
    for (int i = 0; whole && i < threads; i++) {
        s->row[i] = zeros(row, 4), s->decoded[i] = zeros((size_t)32 * padded(widest), sizeof(Value));
        s->low_rank_input[i] = new_input(max_tokens, rank + 1), s->alone[i] = new_input(ALONE, widest);
        whole = s->row[i] && s->decoded[i] && is_whole(&s->low_rank_input[i]) && is_whole(&s->alone[i]);
    }
#if BF16_UNIT
    s->fixed.width = padded(m->hidden);
    s->fixed.high = zeros(W * s->fixed.width, 1), s->fixed.low = zeros(W * s->fixed.width, 1);
    s->fixed.step = zeros(W, sizeof(float)), s->fixed.offset = zeros(W, sizeof(int64_t));
    whole = whole && s->fixed.high && s->fixed.low && s->fixed.step && s->fixed.offset;
#endif
    if (whole) return s;
    engine_free(s);
    return NULL;
}

/* Sum of a buffer by all threads, for the rate at which this machine reads memory: bytes a multiple of 256 x threads */
uint64_t engine_stream(const uint64_t *buffer, size_t bytes, int threads) {
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (size_t i = 0; i < bytes / 256; i++) {
        __builtin_prefetch((const char *)(buffer + 32 * i) + 4096);
        uint64_t sum[8] = {0};
        for (int j = 0; j < 32; j++) sum[j & 7] += buffer[32 * i + j];
        for (int j = 0; j < 8; j++) total += sum[j];
    }
    return total;
}

/* One pass. tokens, slots, positions [N], N <= max_tokens, W <= N: positions of a slot follow each other without a gap, and what
 * lies before them is in the cache. wanted [W]: indices into tokens. rows [row_count] rising ids that compete, or NULL
 * for the first row_count; row_count 0: no logits. own[own_start[n] .. own_start[n + 1]]: further ids that compete for
 * wanted token n alone, or NULL. Writes ids and gaps (to the second best) [W], hidden [W, D] unless
 * NULL, and with top_k the lists of log-probabilities. All checks are the caller's. */
void engine_forward(const Model *model, const Cache *cache, Scratch *scratch, int count, const int32_t *tokens,
                    const int32_t *slots, const int32_t *positions, int wanted_count, const int32_t *wanted, int row_count,
                    const int32_t *rows, const int32_t *own, const int32_t *own_start, int32_t *ids, float *gaps, float *hidden, int top_k, int32_t *top_ids,
                    float *top_values, float *tails) {
    const Call call = {model,     cache, scratch, tokens, slots, positions, wanted,     rows, own, own_start, count, wanted_count,
                       row_count, ids,   gaps,    hidden, top_k, top_ids,   top_values, tails};
    Barrier barrier = {0};
    barrier.threads = scratch->threads;
#pragma omp parallel num_threads(scratch->threads)
    {
#pragma omp single
        barrier.threads = omp_get_num_threads(); /* fewer where the system grants fewer */
        Thread t = {omp_get_thread_num(), omp_get_num_threads(), &barrier};
        embed(t, &call);
        meet(&barrier);
        for (int i = 0; i < model->layers; i++) block(t, &call, i);
        choose(t, &call);
    }
}
