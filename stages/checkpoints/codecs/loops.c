#define _XOPEN_SOURCE 700
#define _DEFAULT_SOURCE
#define _FILE_OFFSET_BITS 64

/* Loops that unpack weights: one pass over the bytes, where operators of numpy and torch take half a dozen.

   stages/machine/compiled_code.py has the system's compiler make them, for the processor they run on; without one the
   operators stay. What comes out is the same to the bit: each value is computed by the same operations in the same
   order, and no two of them are contracted to one (-ffp-contract=off). All is written so that compilers vectorise it:
   no branches within a run, no tables where shifts do.

   All loops are called alike, with what they need in one structure: so reads can go before any in the same call. */

#include <stdint.h>
#include <string.h>
#include <unistd.h>
#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif
#if defined(__AVX512BW__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Rounding to nearest, ties to even. What is no number becomes the quiet one without a sign or payload. */

INLINE uint16_t number_to_bfloat16(float value) {
    uint32_t bits = as_bits(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_bfloat16(float value) {
    return (as_bits(value) & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : number_to_bfloat16(value);
}

INLINE uint16_t to_float16(float value) {
    uint32_t bits = as_bits(value), size = bits & 0x7fffffff;
    uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t subnormal = as_bits(as_float(size) + 0.5f) - 0x3f000000; /* a half's last bit is worth 2^-24 there */
    uint32_t beyond = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t magnitude = size >= 0x47800000 ? beyond : size < 0x38800000 ? subnormal : normal;
    return (uint16_t)((bits >> 16 & 0x8000) | magnitude);
}

INLINE float to_float32(float value) { return value; }

enum { BFLOAT16, FLOAT16, FLOAT32, DTYPES };
#define SIZE_OF(dtype) ((dtype) == FLOAT32 ? 4 : 2)

/* What a loop needs: where the codes, their scales and what is above these are, where what comes of them goes, and what
   else it tells. */
typedef struct {
    const uint8_t *codes, *scales, *above;
    char *made;
    const void *table;
    const float *scale_table;
    int64_t kind, dtype, rows, columns, across, inside, block_rows, block_columns, scale_kind, above_run;
    float offset;
} Work;

/* Codes and what they stand for. */

INLINE float of_fp8_number(uint32_t code) {
    uint32_t size = code & 0x7f;
    uint32_t normal = (size << 20) + (120u << 23);
    uint32_t subnormal = as_bits(as_float((size << 20) + (121u << 23)) - 0x1p-6f);
    return as_float((size < 8 ? subnormal : normal) | (code & 0x80) << 24);
}

INLINE float of_fp8(uint32_t code) { return (code & 0x7f) == 0x7f ? as_float(0x7fc00000) : of_fp8_number(code); }

INLINE float of_fp4(uint32_t code) {
    uint32_t size = code & 7;
    uint32_t normal = (size << 22) + (126u << 23), subnormal = as_bits((float)(int32_t)size * 0.5f);
    return as_float((size < 2 ? subnormal : normal) | (code & 8) << 28);
}

INLINE float of_int8(uint32_t code) { return (float)(int8_t)code; }

INLINE float of_int4(uint32_t code) { return (float)((int32_t)code - 8); }

/* Runs of codes that share a scale. */

typedef void (*Run)(const uint8_t *restrict codes, float scale, void *restrict made, int64_t count);

#define RUN_OF_BYTES(code, dtype, type)                                                                       \
    static void code##_##dtype(const uint8_t *restrict codes, float scale, void *restrict made, int64_t count) { \
        type *restrict values = made;                                                                         \
        for (int64_t at = 0; at < count; at++) values[at] = to_##dtype(of_##code(codes[at]) * scale);         \
    }

#define RUN_OF_PAIRS(code, dtype, type)                                                                       \
    static void code##_##dtype(const uint8_t *restrict codes, float scale, void *restrict made, int64_t count) { \
        type *restrict values = made;                                                                         \
        for (int64_t at = 0; at < count / 2; at++) {                                                          \
            values[2 * at] = to_##dtype(of_##code(codes[at] & 15) * scale);                                   \
            values[2 * at + 1] = to_##dtype(of_##code(codes[at] >> 4) * scale);                               \
        }                                                                                                     \
    }

#define RUNS(kind, code) kind(code, bfloat16, uint16_t) kind(code, float16, uint16_t) kind(code, float32, float)

RUNS(RUN_OF_BYTES, fp8)
RUNS(RUN_OF_BYTES, int8)
RUNS(RUN_OF_PAIRS, fp4)
RUNS(RUN_OF_PAIRS, int4)

enum { FP8, INT8, FP4, INT4, CODES, TABLE = CODES };

static const Run RUN[CODES][DTYPES] = {
    {fp8_bfloat16, fp8_float16, fp8_float32},
    {int8_bfloat16, int8_float16, int8_float32},
    {fp4_bfloat16, fp4_float16, fp4_float32},
    {int4_bfloat16, int4_float16, int4_float32},
};

/* The usual run of FP8 in a quarter less time: all its codes and its scale are numbers, and so is each product. */
static void fp8_numbers(const uint8_t *restrict codes, float scale, uint16_t *restrict made, int64_t count) {
    for (int64_t at = 0; at < count; at++) made[at] = number_to_bfloat16(of_fp8_number(codes[at]) * scale);
}

static int are_numbers(const uint8_t *codes, int64_t count) {
    int64_t at = 0;
    uint8_t most = 0;
#ifdef __AVX512BW__
    const __m512i none = _mm512_set1_epi8(0x7f);
    __m512i found = _mm512_setzero_si512();
    for (; at + 64 <= count; at += 64)
        found = _mm512_max_epu8(found, _mm512_and_si512(_mm512_loadu_si512(codes + at), none));
    most = _mm512_cmpeq_epi8_mask(found, none) ? 0x7f : 0;
#elif defined(__AVX2__)
    const __m256i none = _mm256_set1_epi8(0x7f);
    __m256i found = _mm256_setzero_si256(), other = found;
    for (; at + 64 <= count; at += 64) {
        found = _mm256_max_epu8(found, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(codes + at)), none));
        other = _mm256_max_epu8(other, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(codes + at + 32)), none));
    }
    most = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(found, other), none)) ? 0x7f : 0;
#endif
    for (; at < count; at++) {
        uint8_t size = codes[at] & 0x7f;
        most = size > most ? size : most;
    }
    return most < 0x7f;
}

INLINE int is_finite(float value) { return value - value == 0; }

/* Float32 at any byte. */
INLINE float float_at(const uint8_t *place) {
    float value;
    memcpy(&value, place, sizeof value);
    return value;
}

#ifdef __F16C__
INLINE float half_at(const uint8_t *place) {
    uint16_t bits;
    memcpy(&bits, place, sizeof bits);
    return _cvtsh_ss(bits);
}
#else
static float half_at(const uint8_t *place) {
    uint32_t bits = place[0] | (uint32_t)place[1] << 8, size = bits & 0x7fff;
    uint32_t normal = (size << 13) + (112u << 23), subnormal = as_bits((float)(int32_t)size * 0x1p-24f);
    uint32_t number = size >= 0x7c00 ? size << 13 | 0x7f800000 : size < 0x400 ? subnormal : normal;
    return as_float(number | (bits & 0x8000) << 16);
}
#endif

enum { OF_BFLOAT16, OF_FLOAT16, OF_FLOAT32, OF_FP8, OF_E8M0, OF_EXPONENTS, OF_TABLE };

/* A scale as it rests, at any byte: a float; FP8; a power of two by its exponent, of which the last is no number in e8m0
   and infinite in a plain byte; or one of a table. */
INLINE float stored_scale(const Work *all, int64_t at) {
    const uint8_t *scales = all->scales;
    if (all->scale_kind == OF_FLOAT32) return float_at(scales + 4 * at);
    switch (all->scale_kind) {
        case OF_BFLOAT16: return as_float((uint32_t)(scales[2 * at] | scales[2 * at + 1] << 8) << 16);
        case OF_FLOAT16: return half_at(scales + 2 * at);
        case OF_FP8: return of_fp8(scales[at]);
        case OF_TABLE: return all->scale_table[scales[at]];
        default:
            if (scales[at] == 255 && all->scale_kind == OF_E8M0) return as_float(0x7fc00000);
            return as_float(scales[at] ? (uint32_t)scales[at] << 23 : 0x400000);
    }
}

/* The scale of the block at: those of a table have a scale above them and an offset, others may be divided by one. */
INLINE float scale_at(const Work *all, const uint8_t *above, int64_t at) {
    float scale = stored_scale(all, at);
    if (!above) return scale;
    if (all->scale_kind != OF_TABLE) return scale / float_at(above);
    scale = scale * float_at(above);
    return scale + all->offset;
}

/* Codes of four bits whose values a table has: pairs[byte] are the two of a byte. */

enum { PIECE = 512 };

#define RUN_OF_TABLE(dtype, type)                                                                             \
    static void table_##dtype(const uint8_t *restrict codes, const float (*restrict pairs)[2], float scale,   \
                              void *restrict made, int64_t count) {                                           \
        type *restrict values = made;                                                                         \
        float found[PIECE];                                                                                   \
        for (int64_t at = 0; at < count / 2; at++) memcpy(found + 2 * at, pairs[codes[at]], sizeof *pairs);   \
        for (int64_t at = 0; at < count; at++) values[at] = to_##dtype(found[at] * scale);                    \
    }

RUN_OF_TABLE(bfloat16, uint16_t)
RUN_OF_TABLE(float16, uint16_t)
RUN_OF_TABLE(float32, float)

static void run_of_table(const Work *all, const uint8_t *codes, float scale, char *made, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += PIECE) {
        int64_t some = count - begin < PIECE ? count - begin : PIECE;
        char *values = made + begin * SIZE_OF(all->dtype);
        if (all->dtype == BFLOAT16) table_bfloat16(codes + begin / 2, all->table, scale, values, some);
        if (all->dtype == FLOAT16) table_float16(codes + begin / 2, all->table, scale, values, some);
        if (all->dtype == FLOAT32) table_float32(codes + begin / 2, all->table, scale, values, some);
    }
}

/* Rows of a matrix of codes of a kind, each block of rows and columns with a scale of its own. The first row is that of
   number inside among the matrix's; scales has those of its block first, across in each line. */
void unpack_scaled(const Work *all) {
    Run run = all->kind == TABLE ? 0 : RUN[all->kind][all->dtype];
    int64_t per_byte = all->kind >= FP4 ? 2 : 1, first = all->inside / all->block_rows, columns = all->columns;
    const uint8_t *above = all->above;
    int64_t left = all->scale_kind == OF_TABLE ? all->above_run - all->inside % all->above_run : all->rows;
    for (int64_t row = 0; row < all->rows; row++, left--) {
        if (!left) above += 4, left = all->above_run;
        int64_t block = ((all->inside + row) / all->block_rows - first) * all->across;
        int numbers = all->kind == FP8 && all->dtype == BFLOAT16 && are_numbers(all->codes + row * columns, columns);
        for (int64_t begin = 0; begin < columns; begin += all->block_columns, block++) {
            int64_t count = columns - begin < all->block_columns ? columns - begin : all->block_columns;
            int64_t at = row * columns + begin;
            const uint8_t *codes = all->codes + at / per_byte;
            char *made = all->made + at * SIZE_OF(all->dtype);
            float scale = scale_at(all, above, block);
            if (numbers && is_finite(scale))
                fp8_numbers(codes, scale, (uint16_t *)made, count);
            else if (run)
                run(codes, scale, made, count);
            else
                run_of_table(all, codes, scale, made, count);
        }
    }
}

/* MXFP4: rows of groups of 32 values become columns. Tiles of 32 rows fill whole cache lines of each column. */

enum { GROUP_BYTES = 16, GROUP = 32, TILE_ROWS = 32, FOUR_BITS = 16, ONE = 127 };

/* One group of some rows, by the table: scales lie so far apart, and lines of made. */
#define TRANSPOSED(name, type, pair_type)                                                                      \
    static void name(const uint8_t *codes, const uint8_t *scales, int64_t apart, const pair_type *table,       \
                     type *made, int64_t line, int64_t rows) {                                                 \
        type lines[GROUP][TILE_ROWS];                                                                          \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            const pair_type *pairs = table + 256 * (int64_t)scales[row * apart];                               \
            const uint8_t *bytes = codes + row * apart * GROUP_BYTES;                                          \
            for (int at = 0; at < GROUP_BYTES; at++) {                                                         \
                pair_type pair = pairs[bytes[at]];                                                             \
                lines[2 * at][row] = (type)pair;                                                               \
                lines[2 * at + 1][row] = (type)(pair >> 8 * sizeof(type));                                     \
            }                                                                                                  \
        }                                                                                                      \
        for (int at = 0; at < GROUP; at++) memcpy(made + at * line, lines[at], (size_t)rows * sizeof(type));   \
    }

TRANSPOSED(transpose_halves, uint16_t, uint32_t)
TRANSPOSED(transpose_floats, uint32_t, uint64_t)

#ifdef __AVX2__
/* What codes stand for in 32 rows, in floats of 16 bits, and what each row's power of two adds to their exponents. */
#ifdef __AVX512BW__
typedef struct {
    __m512i values, shifted;
} Tile;

INLINE Tile tile_of(const uint16_t *values, __m256i powers, int mantissa) {
    __m512i less = _mm512_sub_epi16(_mm512_cvtepu8_epi16(powers), _mm512_set1_epi16(ONE));
    __m512i own = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)values));
    return (Tile){own, _mm512_sllv_epi16(less, _mm512_set1_epi16((short)mantissa))};
}

/* Write the values of 32 rows' codes, of four bits in bytes; floats as the upper halves that are all of them. */
INLINE void put_column(char *made, Tile tile, __m256i codes, int64_t dtype) {
    __m512i words = _mm512_cvtepu8_epi16(codes), own = _mm512_permutexvar_epi16(words, tile.values);
    own = _mm512_mask_add_epi16(own, _mm512_test_epi16_mask(words, _mm512_set1_epi16(7)), own, tile.shifted);
    if (dtype != FLOAT32) {
        _mm512_storeu_si512(made, own);
        return;
    }
    __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(own));
    __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(own, 1));
    _mm512_storeu_si512(made, _mm512_slli_epi32(low, 16));
    _mm512_storeu_si512(made + 64, _mm512_slli_epi32(high, 16));
}
#else
typedef struct {
    __m256i low, high, shifted[2];
} Tile;

INLINE Tile tile_of(const uint16_t *values, __m256i powers, int mantissa) {
    const __m128i *halves = (const __m128i *)values, below = _mm_set1_epi16(255);
    __m128i first = _mm_loadu_si128(halves), last = _mm_loadu_si128(halves + 1);
    __m128i low = _mm_packus_epi16(_mm_and_si128(first, below), _mm_and_si128(last, below));
    __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(last, 8));
    __m256i one = _mm256_unpacklo_epi8(powers, _mm256_setzero_si256()), less = _mm256_set1_epi16(ONE);
    __m256i two = _mm256_unpackhi_epi8(powers, _mm256_setzero_si256());
    __m128i count = _mm_cvtsi32_si128(mantissa);
    one = _mm256_sll_epi16(_mm256_sub_epi16(one, less), count), two = _mm256_sll_epi16(_mm256_sub_epi16(two, less), count);
    return (Tile){_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high), {one, two}};
}

INLINE void put_column(char *made, Tile tile, __m256i codes, int64_t dtype) {
    __m256i low = _mm256_shuffle_epi8(tile.low, codes), high = _mm256_shuffle_epi8(tile.high, codes);
    __m256i none = _mm256_cmpeq_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(7)), _mm256_setzero_si256());
    __m256i one = _mm256_andnot_si256(_mm256_unpacklo_epi8(none, none), tile.shifted[0]);
    __m256i two = _mm256_andnot_si256(_mm256_unpackhi_epi8(none, none), tile.shifted[1]);
    one = _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), one);
    two = _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), two);
    __m256i halves[] = {_mm256_permute2x128_si256(one, two, 0x20), _mm256_permute2x128_si256(one, two, 0x31)};
    for (int half = 0; half < 2; half++) {
        if (dtype != FLOAT32) {
            _mm256_storeu_si256((__m256i *)made + half, halves[half]);
            continue;
        }
        __m128i parts[] = {_mm256_castsi256_si128(halves[half]), _mm256_extracti128_si256(halves[half], 1)};
        for (int part = 0; part < 2; part++)
            _mm256_storeu_si256((__m256i *)made + 2 * half + part, _mm256_slli_epi32(_mm256_cvtepu16_epi32(parts[part]), 16));
    }
}
#endif

/* The same of a tile's rows, by the values of the codes where the scale is one: bytes are transposed before they become
   values. Returns whether all scales are such that every value is a number of full precision; else nothing is done. */
static int transpose_tile(const Work *all, const uint16_t *values, const uint8_t *codes, const uint8_t *scales,
                          char *made) {
    int halves = all->dtype == FLOAT16;
    uint8_t own[TILE_ROWS], least = halves ? ONE - 13 : 2, most = halves ? ONE + 13 : 252;
    for (int64_t row = 0; row < TILE_ROWS; row++) own[row] = scales[row * all->across];
    __m256i powers = _mm256_loadu_si256((const __m256i *)own), limit = _mm256_set1_epi8((char)(most - least));
    __m256i above = _mm256_sub_epi8(powers, _mm256_set1_epi8((char)least));
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(above, limit), limit)) != -1) return 0;
    Tile tile = tile_of(values, powers, halves ? 10 : 7);
    __m256i bytes[GROUP_BYTES], next[GROUP_BYTES];
#pragma GCC unroll 16
    for (int at = 0; at < GROUP_BYTES; at++) {
        const uint8_t *row = codes + at * all->across * GROUP_BYTES, *other = row + GROUP_BYTES * all->across * GROUP_BYTES;
        bytes[at] = _mm256_set_m128i(_mm_loadu_si128((const __m128i *)other), _mm_loadu_si128((const __m128i *)row));
    }
#pragma GCC unroll 4
    for (int turn = 0; turn < 4; turn++) {
#pragma GCC unroll 8
        for (int at = 0; at < GROUP_BYTES / 2; at++) {
            next[2 * at] = _mm256_unpacklo_epi8(bytes[at], bytes[at + GROUP_BYTES / 2]);
            next[2 * at + 1] = _mm256_unpackhi_epi8(bytes[at], bytes[at + GROUP_BYTES / 2]);
        }
#pragma GCC unroll 16
        for (int at = 0; at < GROUP_BYTES; at++) bytes[at] = next[at];
    }
    int64_t line = all->columns * SIZE_OF(all->dtype);
    const __m256i four = _mm256_set1_epi8(15);
#pragma GCC unroll 16
    for (int at = 0; at < GROUP_BYTES; at++) {
        put_column(made + 2 * at * line, tile, _mm256_and_si256(bytes[at], four), all->dtype);
        __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes[at], 4), four);
        put_column(made + (2 * at + 1) * line, tile, upper, all->dtype);
    }
    return 1;
}
#else
static int transpose_tile(const Work *all, const uint16_t *values, const uint8_t *codes, const uint8_t *scales,
                          char *made) {
    return (void)all, (void)values, (void)codes, (void)scales, (void)made, 0;
}
#endif

/* Rows, with as many groups as there are scales across, become columns of made, whose lines have so many values as it
   has columns; table has the two values of a byte as one number for each scale and byte, the low four bits' first. A
   group is taken of all rows before the next one: so few pages are written to at a time. */
void unpack_mxfp4(const Work *all) {
    int64_t groups = all->across, line = all->columns;
    uint16_t values[FOUR_BITS];
    for (int64_t code = 0; code < FOUR_BITS; code++) {
        const uint64_t *floats = all->table;
        const uint32_t *pairs = all->table;
        values[code] = (uint16_t)(all->dtype == FLOAT32 ? floats[256 * ONE + code] >> 16 : pairs[256 * ONE + code]);
    }
    for (int64_t group = 0; group < groups; group++) {
        for (int64_t row = 0; row < all->rows; row += TILE_ROWS) {
            int64_t count = all->rows - row < TILE_ROWS ? all->rows - row : TILE_ROWS;
            const uint8_t *scales = all->scales + row * groups + group;
            const uint8_t *codes = all->codes + (row * groups + group) * GROUP_BYTES;
            char *made = all->made + (group * GROUP * line + row) * SIZE_OF(all->dtype);
            if (count == TILE_ROWS && transpose_tile(all, values, codes, scales, made)) continue;
            if (all->dtype == FLOAT32)
                transpose_floats(codes, scales, groups, all->table, (uint32_t *)made, line, count);
            else
                transpose_halves(codes, scales, groups, all->table, (uint16_t *)made, line, count);
        }
    }
}

/* Write words of two bytes from their planes. */
void merge_planes(const uint8_t *restrict low, const uint8_t *restrict high, uint16_t *restrict words, int64_t count) {
    for (int64_t at = 0; at < count; at++) words[at] = (uint16_t)(low[at] | high[at] << 8);
}

/* ggml's blocks, as ggml_blocks.py has them. */

/* Products of rows with weights as they rest, which are never unpacked whole.

   Given float32, each number is a sum of the unpacked float32 values times those given, in one order whatever computes it:
   a lane for each of 32 columns adds up those that are 32 apart, first to last, a product and its sum rounded once, as
   processors do it in one step; and then lanes are added in halves. So its bits hang neither on how many rows there are
   nor on how many threads.

   Given bfloat16, where processors add up pairs of its products: values are rounded to bfloat16, and a lane for each of the
   pairs of 64 columns adds the product of the second, then that of the first; all else is the same.

   Unpacking is the same walk over a row. Values are kept then, in floats or rounded, where what they would be multiplied by
   would lie. */

enum { LANES = 32, AT_ONCE = 4 };

/* As many numbers as a register has; and such wherever they lie, since copied as bytes they would go through memory. */
#ifdef __AVX512BW__
enum { PART = 16 };
#else
enum { PART = 8 };
#endif

typedef float Part __attribute__((vector_size(4 * PART)));
typedef float LoosePart __attribute__((vector_size(4 * PART), aligned(4), may_alias));
typedef uint32_t Eight __attribute__((vector_size(32)));

/* Scales, and least values where codes have such, of runs that are to be quantised, as ggml_packing.py fits them: to either
   side of the scale by which codes just span a run some are tried, and that of the least squares is taken. A lane has a run. */

enum { WITH_LEAST = 32, AROUND_ZERO = 16, TO_A_SIDE = 5 };
#define A_STEP 0.25f
#define VARIED 0x1p-17f
#define SMALLEST 0x1p-126f

typedef int32_t Whether __attribute__((vector_size(4 * PART)));

INLINE Part filled(float number) { return number - (Part){0}; }

INLINE Part either(Whether first, Part one, Part two) { return (Part)((first & (Whether)one) | (~first & (Whether)two)); }

INLINE Part at_most(Part numbers, Part most) { return either(numbers > most, most, numbers); }

INLINE Part at_least(Part numbers, Part least) { return either(numbers < least, least, numbers); }

INLINE Part inverse(Part numbers) { return either((numbers < SMALLEST) & (numbers > -SMALLEST), filled(0), 1 / numbers); }

/* The nearest whole numbers, of two the even ones. */
INLINE Part whole(Part numbers) { return numbers + 0x1.8p23f - 0x1.8p23f; }

/* The values of as many runs as there are lanes, or of those left, and the last of them again. */
INLINE void lay_runs(const float *values, int64_t left, int count, Part *laid) {
    for (int run = 0; run < PART; run++) {
        const float *own = values + (run < left ? run : left - 1) * count;
        for (int at = 0; at < count; at++) laid[at][run] = own[at];
    }
}

/* The sum of so many numbers, a power of two, which are used up: one half is added to the other until one is left. */
INLINE Part added(Part *numbers, int count) {
    for (int half = count / 2; half; half /= 2)
        for (int at = 0; at < half; at++) numbers[at] += numbers[at + half];
    return numbers[0];
}

INLINE void keep_runs(Part numbers, int64_t left, float *made) {
    memcpy(made, &numbers, left < PART ? (size_t)left * sizeof(float) : sizeof numbers);
}

/* Codes from zero to the largest, beside a least value that is at most so much. */
void fit_with_least(const float *restrict values, int64_t runs, float largest, float least_at_most, float *restrict scales,
                    float *restrict least) {
    const float count = WITH_LEAST;
    for (int64_t first = 0; first < runs; first += PART) {
        Part over[WITH_LEAST], codes[WITH_LEAST], both[WITH_LEAST], squares[WITH_LEAST];
        lay_runs(values + first * WITH_LEAST, runs - first, WITH_LEAST, over);
        Part low = filled(least_at_most), span = filled(0), fewest = filled(__builtin_inff());
        for (int at = 0; at < WITH_LEAST; at++) low = at_most(over[at], low);
        for (int at = 0; at < WITH_LEAST; at++) both[at] = over[at] -= low, span = at_least(over[at], span);
        const Part to_codes = inverse(span), most = least_at_most - low, of_over = added(both, WITH_LEAST);
        Part scale_of = span / largest, least_of = low;
        for (int step = -TO_A_SIDE; step <= TO_A_SIDE; step++) {
            const Part times = to_codes * (largest + A_STEP * (float)step);
            for (int at = 0; at < WITH_LEAST; at++) {
                codes[at] = at_most(whole(over[at] * times), filled(largest));
                both[at] = over[at] * codes[at], squares[at] = codes[at] * codes[at];
            }
            const Part of_codes = added(codes, WITH_LEAST), of_both = added(both, WITH_LEAST);
            const Part of_squares = added(squares, WITH_LEAST), apart = count * of_squares - of_codes * of_codes;
            Part scale = (count * of_both - of_over * of_codes) / apart, more = (of_over - scale * of_codes) / count;
            const Whether beyond = more > most;
            more = either(beyond, most, more);
            scale = either(beyond, (of_both - most * of_codes) / of_squares, scale);
            const Part left = scale * (scale * of_squares + 2 * (more * of_codes - of_both)) +
                              more * (more * count - 2 * of_over);
            const Whether better = (apart > VARIED * count * of_squares) & (left < fewest);
            scale_of = either(better, scale, scale_of), least_of = either(better, low + more, least_of);
            fewest = either(better, left, fewest);
        }
        keep_runs(scale_of, runs - first, scales + first), keep_runs(least_of, runs - first, least + first);
    }
}

/* Codes from minus the largest to one less than it, of which the value furthest from zero has one below zero. */
void fit_around_zero(const float *restrict values, int64_t runs, float largest, float *restrict scales) {
    for (int64_t first = 0; first < runs; first += PART) {
        Part laid[AROUND_ZERO], both[AROUND_ZERO], squares[AROUND_ZERO];
        lay_runs(values + first * AROUND_ZERO, runs - first, AROUND_ZERO, laid);
        Part low = laid[0], high = laid[0], most = filled(-1);
        for (int at = 1; at < AROUND_ZERO; at++) low = at_most(laid[at], low), high = at_least(laid[at], high);
        const Part furthest = either(high > -low, high, low), to_codes = inverse(furthest);
        Part scale_of = furthest / -largest;
        for (int step = -TO_A_SIDE; step <= TO_A_SIDE; step++) {
            const Part times = to_codes * -(largest + A_STEP * (float)step);
            for (int at = 0; at < AROUND_ZERO; at++) {
                const Part code = at_least(at_most(whole(laid[at] * times), filled(largest - 1)), filled(-largest));
                both[at] = laid[at] * code, squares[at] = code * code;
            }
            const Part of_both = added(both, AROUND_ZERO), of_squares = added(squares, AROUND_ZERO);
            const Part gain = of_both * of_both / of_squares;
            scale_of = either(gain > most, of_both / of_squares, scale_of), most = at_least(most, gain);
        }
        keep_runs(scale_of, runs - first, scales + first);
    }
}

/* What values of a block are scaled by, and what is added to them, of each of some rows, row by row: a scale, after which
   what is added where there is such; or those of up to RUNS runs, what is added in the second half of these.

   A block of K has eight runs of 32. Both of each are six bits, under a float16 each, what is added being minus their
   minima: of the first four runs together, of the last two above the first ones' and four beside. */
enum { RUNS = 16 };

/* The ways in which a row is walked over. Of a product in tiles only values are walked over, which are kept rounded. */
enum { FLOATS, PAIRS, KEPT, KEPT_PAIRS = KEPT + PAIRS, WAYS, TILES = WAYS + PAIRS };
#ifdef __AVX512BF16__
#define WITH_PAIRS(...) __VA_ARGS__
#define HAS_PAIRS 1
#else
#define WITH_PAIRS(...)
#define HAS_PAIRS 0
#endif

/* The way in which rows of bfloat16 are multiplied here: as floats, or in pairs or tiles of them. A system lets a process
   use the registers of tiles once it has asked for them. */
int32_t way_of_bfloat16(void) {
#if HAS_TILES
    enum { ASK_FOR_PARTS = 0x1023, TILE_DATA = 18 };
    if (!syscall(SYS_arch_prctl, ASK_FOR_PARTS, TILE_DATA)) return TILES;
#endif
    return HAS_PAIRS ? PAIRS : FLOATS;
}

INLINE int in_pairs(int64_t way) { return HAS_PAIRS && way & PAIRS; }

/* How many bytes a number takes of what is given. */
INLINE int64_t bytes_of(int64_t way) { return in_pairs(way) ? 2 : 4; }

/* What is given from so many columns on. */
INLINE const void *given_at(int64_t way, const void *given, int64_t columns) {
    return (const char *)given + columns * bytes_of(way);
}

/* So many rows of a weight are read side by side where one row is given, and registers hold the sums of all: what is given
   is loaded once for them, which takes as long as a product. */
#ifdef __AVX512BW__
enum { SIDE = 4, BLOCKS = 8 };
#else
enum { SIDE = 1, BLOCKS = 1 };
#endif

#ifdef __AVX512BW__
typedef struct {
    __m512 low, high;
} Lanes;

INLINE __m512 as_numbers(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }

INLINE __m512 sixteen(const int8_t *codes) { return as_numbers(_mm_loadu_si128((const __m128i *)codes)); }

INLINE __m512 shifted(__m512 values, const float *more) {
    return more ? _mm512_add_ps(values, _mm512_set1_ps(*more)) : values;
}

INLINE Lanes values_at(const float *values) { return (Lanes){_mm512_loadu_ps(values), _mm512_loadu_ps(values + 16)}; }

/* Values in bfloat16; and sums to which products of such are added, in pairs. */
#ifdef __AVX512BF16__
INLINE __m512i rounded(Lanes values) { return (__m512i)_mm512_cvtne2ps_pbh(values.high, values.low); }

INLINE __m512 with_pairs(__m512 sums, __m512i one, __m512i two) {
    return _mm512_dpbf16_ps(sums, (__m512bh)one, (__m512bh)two);
}
#else
INLINE __m512i rounded(Lanes values) { return _mm512_castps_si512(values.low); }

INLINE __m512 with_pairs(__m512 sums, __m512i one, __m512i two) { return (void)one, (void)two, sums; }
#endif

/* What is given for 32 columns, in registers for as long as it serves several rows; pairs are in the first. Of values that
   are kept, where. */
typedef struct {
    __m512 low, high;
    void *room;
} Shared;

INLINE Shared shared_at(int way, const void *given) {
    Shared these = {.room = (void *)given};
    if (way & KEPT) return these;
    these.low = _mm512_loadu_ps(given);
    __asm__("" : "+v"(these.low));
    if (in_pairs(way)) return these;
    these.high = _mm512_loadu_ps((const float *)given + 16);
    __asm__("" : "+v"(these.high));
    return these;
}

/* Of pairs, 32 columns are half of what lanes add up: the halves of these take turns. */
INLINE void add_rounded(int way, Lanes *lanes, __m512i values, Shared given) {
    if (way & KEPT) {
        _mm512_storeu_si512(given.room, values);
        return;
    }
    __m512 sums = with_pairs(lanes->low, values, _mm512_castps_si512(given.low));
    lanes->low = lanes->high, lanes->high = sums;
}

INLINE void add_shared(int way, Lanes *lanes, Lanes values, Shared given) {
    if (in_pairs(way)) {
        add_rounded(way, lanes, rounded(values), given);
    }
    else if (way & KEPT) {
        _mm512_storeu_ps(given.room, values.low);
        _mm512_storeu_ps((float *)given.room + 16, values.high);
    }
    else {
        lanes->low = _mm512_fmadd_ps(values.low, given.low, lanes->low);
        lanes->high = _mm512_fmadd_ps(values.high, given.high, lanes->high);
    }
}

/* 32 codes as values. Either half has its scale, and what is to be added to each where that isn't null. */
INLINE Lanes of_codes(const int8_t *codes, float low, float high) {
    return (Lanes){_mm512_mul_ps(sixteen(codes), _mm512_set1_ps(low)), _mm512_mul_ps(sixteen(codes + 16), _mm512_set1_ps(high))};
}

/* The sum of all lanes, which are added in halves. */
INLINE float sum_of(const Lanes *lanes) {
    __m512 both = _mm512_add_ps(lanes->low, lanes->high);
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(both), 1));
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(both), upper);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Sixteen codes, one of four pieces of a register of bytes, as numbers. */
INLINE __m512 sixteen_of(__m512i codes, int piece) {
    __m128i pieces[] = {_mm512_castsi512_si128(codes), _mm512_extracti32x4_epi32(codes, 1),
                        _mm512_extracti32x4_epi32(codes, 2), _mm512_extracti32x4_epi32(codes, 3)};
    return as_numbers(pieces[piece]);
}

/* The same times a number, which is such that each code may be taken as so many times larger. */
#ifdef __AVX512VBMI__
#define LARGER 0x1p24f
INLINE __m512 sixteen_larger(__m512i codes, int piece) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i places = _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16 * piece)), 24);
    return _mm512_cvtepi32_ps(_mm512_maskz_permutexvar_epi8(0x8888888888888888, places, codes));
}
#else
#define LARGER 1
INLINE __m512 sixteen_larger(__m512i codes, int piece) { return sixteen_of(codes, piece); }
#endif

/* Halves as numbers: one or two of a block of each of some rows, row by row. */
INLINE __m256 halves_of(int each, int some, const uint8_t *block, int64_t apart) {
    uint64_t all[2] = {0};
#pragma GCC unroll 4
    for (int row = 0; row < some; row++) {
        uint32_t these = 0;
        memcpy(&these, block + row * apart, 2 * (size_t)each);
        all[each * row / 4] |= (uint64_t)these << 16 * each * row % 64;
    }
    __m128i halves = _mm_cvtsi64_si128((int64_t)all[0]);
    return _mm256_cvtph_ps(each == 1 ? halves : _mm_insert_epi64(halves, (int64_t)all[1], 1));
}

/* One of some numbers, in all places. */
INLINE __m512 one_of(__m256 numbers, int at) {
    return _mm512_permutexvar_ps(_mm512_set1_epi32(at), _mm512_castps256_ps512(numbers));
}

INLINE void scales_of_blocks(int some, const uint8_t *block, int64_t apart, float *made) {
    if (some == 1)
        *made = half_at(block);
    else
        _mm256_storeu_ps(made, halves_of(1, some, block, apart));
}

INLINE void scales_and_mores(int some, const uint8_t *block, int64_t apart, float *made) {
    _mm256_storeu_ps(made, halves_of(2, some, block, apart));
}

INLINE void scales_of_k(int some, const uint8_t *block, int64_t apart, float *made) {
    const __m512i own = _mm512_broadcast_i32x4(_mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    const __m512i above = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
    const __m512i shifts = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 0, 4));
    const __m512i pairs = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512i heads = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int row = 0; row < some; row++) {
        __m128i head = _mm_loadu_si128((const __m128i *)(block + row * apart));
        heads = _mm512_mask_broadcast_i32x4(heads, (__mmask16)(15 << 4 * row), head);
    }
    __m512i lower = _mm512_and_si512(_mm512_srlv_epi32(_mm512_shuffle_epi32(heads, 0xed), shifts), own);
    __m512i upper = _mm512_and_si512(_mm512_srli_epi32(_mm512_shuffle_epi32(heads, 0xa5), 2), above);
    __m512i codes = _mm512_or_si512(lower, upper);
    __m256 halves = _mm256_xor_ps(halves_of(2, some, block, apart), _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f));
#pragma GCC unroll 4
    for (int row = 0; row < some; row++) {
        __m512i these = _mm512_add_epi32(pairs, _mm512_set1_epi32(2 * row));
        __m512 factors = _mm512_permutexvar_ps(these, _mm512_castps256_ps512(halves));
        _mm512_storeu_ps(made + RUNS * row, _mm512_mul_ps(sixteen_of(codes, row), factors));
    }
}

INLINE void scales_of_q6_k(int some, const uint8_t *block, int64_t apart, float *made) {
    __m256 halves = _mm256_mul_ps(halves_of(1, some, block + 208, apart), _mm256_set1_ps(1 / LARGER));
#pragma GCC unroll 4
    for (int row = 0; row < some; row++) {
        __m512 codes = sixteen((const int8_t *)block + row * apart + 192);
        _mm512_storeu_ps(made + RUNS * row, _mm512_mul_ps(one_of(halves, row), codes));
    }
}

/* The values of codes up to 15, and of those from 16 on, where there are such. They are computed once for a run, and looked
   up. Products of scales and codes are exact: what is added to them may be in one step, which differs for what is no number
   alone, in bits that are kept. */
typedef struct {
    __m512 lower, upper;
} Values;

INLINE __m512 values_from(int way, int first, float scale, const float *more) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 numbers = _mm512_add_ps(codes, _mm512_set1_ps((float)first)), scales = _mm512_set1_ps(scale);
    if (way & KEPT || !more) return shifted(_mm512_mul_ps(numbers, scales), more);
    return _mm512_fmadd_ps(numbers, scales, _mm512_set1_ps(*more));
}

INLINE Values values_of(int way, int five, int less, float scale, const float *more) {
    __m512 lower = values_from(way, -less, scale, more);
    return (Values){lower, five ? values_from(way, 16 - less, scale, more) : lower};
}

/* The value of each of sixteen codes, of which the lowest four bits are looked at, and five where the fifth is told. */
INLINE __m512 looked_up(int five, Values values, __m512i codes, uint32_t fifth) {
    __m512 found = _mm512_permutexvar_ps(codes, values.lower);
    return five ? _mm512_mask_permutexvar_ps(found, (__mmask16)fifth, codes, values.upper) : found;
}

/* Add a block of 32 codes: the lower ones of all bytes, and then the upper ones. */
INLINE void add_block(int way, int five, Lanes *lanes, const uint8_t *packed, const uint8_t *fifth, Values values,
                      Shared these) {
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)packed));
    uint32_t bits = 0;
    if (five) memcpy(&bits, fifth, sizeof bits);
    __m512 low = looked_up(five, values, codes, bits);
    __m512 high = looked_up(five, values, _mm512_srli_epi32(codes, 4), bits >> 16);
    add_shared(way, lanes, (Lanes){low, high}, these);
}

/* Blocks begin with a scale, which what is added to values may follow, and then the fifth bits if there are such. */
#define ADD_BLOCKS(format, five, less, with_more)                                                                       \
    INLINE void add_##format(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,   \
                             const float *scales) {                                                                     \
        enum { FIFTH = 2 + 2 * with_more, CODES = FIFTH + 4 * five };                                                   \
        Shared these = shared_at(way, given);                                                                           \
        _Pragma("GCC unroll 4") for (int row = 0; row < some; row++, block += apart, scales += 1 + with_more) {         \
            Values values = values_of(way, five, less, *scales, with_more ? scales + 1 : 0);                            \
            add_block(way, five, lanes + row, block + CODES, block + FIFTH, values, these);                             \
        }                                                                                                               \
    }

ADD_BLOCKS(q4_0, 0, 8, 0)
ADD_BLOCKS(q4_1, 0, 0, 1)
ADD_BLOCKS(q5_0, 1, 16, 0)
ADD_BLOCKS(q5_1, 1, 0, 1)

/* Add 32 bytes of two codes each, whose fifth bits lie at a place in bytes of their own: the lower ones are a run, the
   upper ones the next. */
INLINE void add_runs(int way, int five, Lanes *lanes, const uint8_t *packed, const uint8_t *fifth, int place,
                     const float *scales, Shared these, Shared next) {
    const float *mores = scales + RUNS / 2;
    Values first = values_of(way, five, 0, scales[0], mores), second = values_of(way, five, 0, scales[1], mores + 1);
    if (in_pairs(way) && !five) {
        __m512i both = rounded((Lanes){first.lower, second.lower});
        __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)packed));
        __m512i lower = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
        __m512i upper = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi16(16));
        add_rounded(way, lanes, _mm512_permutexvar_epi16(lower, both), these);
        add_rounded(way, lanes, _mm512_permutexvar_epi16(upper, both), next);
        return;
    }
    uint32_t bits = 0, more = 0;
    if (five) {
        __m512i all = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)fifth));
        bits = (uint32_t)_mm512_test_epi8_mask(all, _mm512_set1_epi8((char)(1 << place)));
        more = (uint32_t)_mm512_test_epi8_mask(all, _mm512_set1_epi8((char)(2 << place)));
    }
    __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)packed));
    __m512i high = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(packed + 16)));
    add_shared(way, lanes, (Lanes){looked_up(five, first, low, bits), looked_up(five, first, high, bits >> 16)}, these);
    low = _mm512_srli_epi32(low, 4), high = _mm512_srli_epi32(high, 4);
    add_shared(way, lanes, (Lanes){looked_up(five, second, low, more), looked_up(five, second, high, more >> 16)}, next);
}

INLINE void add_k(int way, int five, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                  const float *scales) {
    for (int run = 0; run < 8; run += 2) {
        Shared these = shared_at(way, given_at(way, given, LANES * run));
        Shared next = shared_at(way, given_at(way, given, LANES * (run + 1)));
#pragma GCC unroll 4
        for (int row = 0; row < some; row++) {
            const uint8_t *fifth = block + row * apart + 16, *packed = fifth + 32 * five + 16 * run;
            add_runs(way, five, lanes + row, packed, fifth, run, scales + RUNS * row + run, these, next);
        }
    }
}

INLINE void add_q4_k(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                     const float *scales) {
    add_k(way, 0, some, lanes, block, apart, given, scales);
}

INLINE void add_q5_k(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                     const float *scales) {
    add_k(way, 1, some, lanes, block, apart, given, scales);
}

/* The 64 codes of the pair of runs in the half of a block. */
INLINE __m512i codes_of_q6_k(const uint8_t *block, int half, int pair) {
    const __m512i four = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30), less = _mm512_set1_epi8(32);
    const __m512i shifts = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    __m512i low = _mm512_loadu_si512(block + 64 * half);
    __m512i upper = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(block + 128 + 32 * half)));
    if (pair) low = _mm512_srli_epi16(low, 4), upper = _mm512_srli_epi16(upper, 4);
    __m512i high = _mm512_and_si512(_mm512_sllv_epi16(upper, shifts), two);
    return _mm512_sub_epi8(_mm512_or_si512(_mm512_and_si512(low, four), high), less);
}

INLINE void add_q6_k(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                     const float *scales) {
    for (int pair = 0; pair < 4; pair++) {
        Shared these[] = {shared_at(way, given_at(way, given, 2 * LANES * pair)),
                          shared_at(way, given_at(way, given, 2 * LANES * pair + LANES))};
#pragma GCC unroll 4
        for (int row = 0; row < some; row++) {
            __m512i codes = codes_of_q6_k(block + row * apart, pair / 2, pair % 2);
            for (int run = 0; run < 2; run++) {
                const float *own = scales + RUNS * row + 4 * pair + 2 * run;
                __m512 first = _mm512_mul_ps(sixteen_larger(codes, 2 * run), _mm512_set1_ps(own[0]));
                __m512 second = _mm512_mul_ps(sixteen_larger(codes, 2 * run + 1), _mm512_set1_ps(own[1]));
                add_shared(way, lanes + row, (Lanes){first, second}, these[run]);
            }
        }
    }
}

/* Of FP8, all of them numbers, and scales times what makes up for that: a half has one bit of exponent more, and all that FP8
   has, in a 256th. */
#define FP8_TIMES 256
INLINE Lanes of_fp8_codes(const uint8_t *codes, float low, float high) {
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes)); /* the sign is in both of its places */
    __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbf80));
    __m512 first = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    __m512 second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    return (Lanes){_mm512_mul_ps(first, _mm512_set1_ps(low)), _mm512_mul_ps(second, _mm512_set1_ps(high))};
}

typedef __m512 Table;

INLINE Table table_of(const float *values) { return _mm512_loadu_ps(values); }

/* Of four bits, which are numbers of sixteen values; of the two in a byte the upper or the lower comes first. Each byte is
   put in the places of its two codes, and values are scaled before they are looked up. */
INLINE Lanes of_nibbles(const uint8_t *codes, Table table, int upper_first, float low, float high) {
    const __m512i lower = _mm512_set1_epi64(4ll << 32), upper = _mm512_set1_epi64(4), shifts = upper_first ? upper : lower;
    const __m512i places = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes));
    __m512i first = _mm512_shuffle_epi8(bytes, places);
    __m512i second = _mm512_shuffle_epi8(bytes, _mm512_add_epi32(places, _mm512_set1_epi32(8)));
    return (Lanes){_mm512_permutexvar_ps(_mm512_srlv_epi32(first, shifts), _mm512_mul_ps(table, _mm512_set1_ps(low))),
                   _mm512_permutexvar_ps(_mm512_srlv_epi32(second, shifts), _mm512_mul_ps(table, _mm512_set1_ps(high)))};
}
#else
typedef struct {
    Part of[LANES / PART];
} Lanes;

INLINE Lanes values_at(const float *values) {
    Lanes lanes;
    for (int at = 0; at < LANES / 8; at++) lanes.of[at] = *(const LoosePart *)(values + 8 * at);
    return lanes;
}

/* All here is of floats: pairs are for processors that add up their products in one step. */

typedef const float *Shared;

INLINE Shared shared_at(int way, const void *given) { return (void)way, given; }

/* Products added to sums, each rounded once. */
INLINE Part octet_added(Part one, Part two, Part sums) {
#ifdef __FMA__
    return (Part)_mm256_fmadd_ps((__m256)one, (__m256)two, (__m256)sums);
#else
    for (int at = 0; at < 8; at++) sums[at] = __builtin_fmaf(one[at], two[at], sums[at]);
    return sums;
#endif
}

INLINE void add_octet(int way, Part *sums, Part values, const float *given) {
    if (way & KEPT)
        *(LoosePart *)(void *)given = values;
    else
        *sums = octet_added(values, *(const LoosePart *)given, *sums);
}

INLINE void add_shared(int way, Lanes *lanes, Lanes values, Shared given) {
    for (int at = 0; at < LANES / 8; at++) add_octet(way, lanes->of + at, values.of[at], given + 8 * at);
}

INLINE float sum_of(const Lanes *lanes) {
    Part both = (lanes->of[0] + lanes->of[2]) + (lanes->of[1] + lanes->of[3]);
#ifdef __AVX2__
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)both), _mm256_extractf128_ps((__m256)both, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return ((both[0] + both[4]) + (both[2] + both[6])) + ((both[1] + both[5]) + (both[3] + both[7]));
#endif
}

INLINE Lanes scaled(Lanes values, float low, float high) {
    for (int at = 0; at < LANES / 8; at++) values.of[at] *= at < LANES / 16 ? low : high;
    return values;
}

INLINE Part octet_of(const int8_t *codes) {
#ifdef __AVX2__
    return (Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
    Part made;
    for (int at = 0; at < 8; at++) made[at] = (float)codes[at];
    return made;
#endif
}

INLINE Lanes of_codes(const int8_t *codes, float low, float high) {
    Lanes made;
    for (int at = 0; at < LANES / 8; at++) made.of[at] = octet_of(codes + 8 * at);
    return scaled(made, low, high);
}

INLINE Eight eight_bytes(const uint8_t *bytes) {
#ifdef __AVX2__
    return (Eight)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
#else
    Eight made;
    for (int at = 0; at < 8; at++) made[at] = bytes[at];
    return made;
#endif
}

INLINE Part as_numbers(Eight codes) {
    typedef int32_t Signed __attribute__((vector_size(32)));
    return __builtin_convertvector((Signed)codes, Part);
}

/* Codes times a scale, and what is added to them. Products of scales and codes are exact: what is added to them may be in one
   step, which differs for what is no number alone, in bits that are kept. */
INLINE Part shifted(int way, Part codes, float scale, float more) {
    if (way & KEPT) return codes * scale + more;
    return octet_added(codes, scale - (Part){0}, more - (Part){0});
}

#if defined(__AVX2__) && defined(__F16C__)
/* Of FP8, all of them numbers, and scales times what makes up for that: halves, which are a 256th of what codes mean. */
#define FP8_TIMES 256
INLINE Lanes of_fp8_codes(const uint8_t *codes, float low, float high) {
    Lanes made;
    for (int at = 0; at < 2; at++) {
        __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes + at)); /* the sign in both its places */
        __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80));
        made.of[2 * at] = (Part)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        made.of[2 * at + 1] = (Part)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
    return scaled(made, low, high);
}

/* The bytes of sixteen values, in either half of a register all that are lowest, and so on. Codes as bytes look them up,
   which are put together. */
typedef struct {
    __m256i bytes[4];
} Table;

INLINE Table table_of(const float *values) {
    const __m128i turned = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128i fours[4];
    for (int at = 0; at < 4; at++) fours[at] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)values + at), turned);
    __m128i low = _mm_unpacklo_epi32(fours[0], fours[1]), high = _mm_unpackhi_epi32(fours[0], fours[1]);
    __m128i more = _mm_unpacklo_epi32(fours[2], fours[3]), most = _mm_unpackhi_epi32(fours[2], fours[3]);
    __m128i bytes[] = {_mm_unpacklo_epi64(low, more), _mm_unpackhi_epi64(low, more), _mm_unpacklo_epi64(high, most),
                       _mm_unpackhi_epi64(high, most)};
    Table table;
    for (int at = 0; at < 4; at++) table.bytes[at] = _mm256_broadcastsi128_si256(bytes[at]);
    return table;
}

/* Of four bits, which are numbers of sixteen values; of the two in a byte the upper or the lower comes first. All values but
   those of tables of their own are such that their lower bytes are zeros. */
INLINE Lanes of_nibbles(const uint8_t *codes, Table table, int upper_first, float low, float high) {
    const __m256i places = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13, 2, 2, 3, 3, 6, 6, 7, 7, 10, 10,
                                            11, 11, 14, 14, 15, 15);
    const __m256i even = _mm256_set1_epi16(0x000f), odd = _mm256_set1_epi16(0x0f00);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes)), places);
    __m256i above = _mm256_srli_epi16(bytes, 4), first = upper_first ? above : bytes, second = upper_first ? bytes : above;
    __m256i own = _mm256_or_si256(_mm256_and_si256(first, even), _mm256_and_si256(second, odd)), found[4];
    for (int at = 0; at < 4; at++) found[at] = _mm256_shuffle_epi8(table.bytes[at], own);
    Lanes made;
    for (int half = 0; half < 2; half++) {
        __m256i lower = half ? _mm256_unpackhi_epi8(found[0], found[1]) : _mm256_unpacklo_epi8(found[0], found[1]);
        __m256i upper = half ? _mm256_unpackhi_epi8(found[2], found[3]) : _mm256_unpacklo_epi8(found[2], found[3]);
        if (!upper_first) lower = _mm256_setzero_si256();
        made.of[2 * half] = (Part)_mm256_unpacklo_epi16(lower, upper);
        made.of[2 * half + 1] = (Part)_mm256_unpackhi_epi16(lower, upper);
    }
    return scaled(made, low, high);
}
#else
#define FP8_TIMES 1
INLINE Lanes of_fp8_codes(const uint8_t *codes, float low, float high) {
    float found[LANES];
    for (int at = 0; at < LANES; at++) found[at] = of_fp8_number(codes[at]);
    return scaled(values_at(found), low, high);
}

typedef const float *Table;

INLINE Table table_of(const float *values) { return values; }

INLINE Lanes of_nibbles(const uint8_t *codes, Table values, int upper_first, float low, float high) {
    float found[LANES];
    for (int at = 0; at < 16; at++) {
        found[2 * at] = values[upper_first ? codes[at] >> 4 : codes[at] & 15];
        found[2 * at + 1] = values[upper_first ? codes[at] & 15 : codes[at] >> 4];
    }
    return scaled(values_at(found), low, high);
}
#endif
#endif

INLINE void add_values(int way, Lanes *lanes, Lanes values, const void *given) {
    add_shared(way, lanes, values, shared_at(way, given));
}

/* Float32 as it is: blocks of a run. */
INLINE void add_f32(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                    const float *scales) {
    Shared these = shared_at(way, given);
#pragma GCC unroll 4
    for (int row = 0; row < some; row++, block += apart) add_shared(way, lanes + row, values_at((const float *)block), these);
    (void)scales;
}

INLINE void no_scales(int some, const uint8_t *block, int64_t apart, float *made) {
    (void)some, (void)block, (void)apart, (void)made;
}

INLINE void add_q8_0(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                     const float *scales) {
    Shared these = shared_at(way, given);
#pragma GCC unroll 4
    for (int row = 0; row < some; row++, block += apart)
        add_shared(way, lanes + row, of_codes((const int8_t *)block + 2, scales[row], scales[row]), these);
}

#ifndef __AVX512BW__
INLINE void scales_of_blocks(int some, const uint8_t *block, int64_t apart, float *made) {
    for (int row = 0; row < some; row++, block += apart) made[row] = half_at(block);
}

INLINE void scales_and_mores(int some, const uint8_t *block, int64_t apart, float *made) {
    for (int row = 0; row < some; row++, block += apart)
        made[2 * row] = half_at(block), made[2 * row + 1] = half_at(block + 2);
}

/* Have single numbers be loaded from where they were made: compilers take registers apart for them, which is slower. */
#define LOADED_FROM(made, count) __asm__("" : "+m"(*(__typeof__(*(made))(*)[count])(made)))

/* Eight numbers of a byte each, times one. */
INLINE void times_bytes(uint64_t bytes, float factor, float *restrict made) {
#ifdef __AVX2__
    __m256i wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
    _mm256_storeu_ps(made, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(factor)));
    LOADED_FROM(made, 8);
#else
    for (int at = 0; at < 8; at++) made[at] = (float)(bytes >> 8 * at & 255) * factor;
#endif
}

INLINE void scales_of_k(int some, const uint8_t *block, int64_t apart, float *made) {
    for (int row = 0; row < some; row++, block += apart, made += RUNS) {
        uint32_t first, second, mixed;
        memcpy(&first, block + 4, sizeof first);
        memcpy(&second, block + 8, sizeof second);
        memcpy(&mixed, block + 12, sizeof mixed);
        uint64_t last = (mixed & 0x0f0f0f0f) | (first >> 2 & 0x30303030);
        uint64_t least = (mixed >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030);
        times_bytes((first & 0x3f3f3f3f) | last << 32, half_at(block), made);
        times_bytes((second & 0x3f3f3f3f) | least << 32, -half_at(block + 2), made + RUNS / 2);
    }
}

INLINE void scales_of_q6_k(int some, const uint8_t *block, int64_t apart, float *made) {
    for (int row = 0; row < some; row++, block += apart, made += RUNS) {
        float scale = half_at(block + 208);
        for (int run = 0; run < RUNS; run += 8)
            *(LoosePart *)(made + run) = octet_of((const int8_t *)block + 192 + run) * scale;
        LOADED_FROM(made, RUNS);
    }
}

/* Add a block of 32 codes: the lower ones of all bytes, and then the upper ones. Of five bits, the fifth lie in four bytes of
   their own. */
INLINE void add_block(int way, int five, uint32_t less, Lanes *lanes, const uint8_t *packed, const uint8_t *fifth,
                      const float *given, float scale, const float *more) {
    static const Eight PLACES = {0, 1, 2, 3, 4, 5, 6, 7};
    uint32_t bits = 0;
    if (five) memcpy(&bits, fifth, sizeof bits);
    const Eight all = bits - (Eight){0};
#pragma GCC unroll 4
    for (uint32_t at = 0; at < LANES / 8; at++) {
        Eight bytes = eight_bytes(packed + 8 * (at % 2)), codes = at < 2 ? bytes & 15 : bytes >> 4;
        if (five) codes |= (at ? all >> (PLACES + (8 * at - 4)) : all << 4 >> PLACES) & 16;
        Part numbers = as_numbers(codes - less);
        add_octet(way, lanes->of + at, more ? shifted(way, numbers, scale, *more) : numbers * scale, given + 8 * at);
    }
}

/* Blocks begin with a scale, which what is added to values may follow, and then the fifth bits if there are such. */
#define ADD_BLOCKS(format, five, less, with_more)                                                                       \
    INLINE void add_##format(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,   \
                             const float *scales) {                                                                     \
        enum { FIFTH = 2 + 2 * with_more, CODES = FIFTH + 4 * five };                                                   \
        for (int row = 0; row < some; row++, block += apart, scales += 1 + with_more)                                   \
            add_block(way, five, less, lanes + row, block + CODES, block + FIFTH, given, *scales,                       \
                      with_more ? scales + 1 : 0);                                                                      \
    }

ADD_BLOCKS(q4_0, 0, 8, 0)
ADD_BLOCKS(q4_1, 0, 0, 1)
ADD_BLOCKS(q5_0, 1, 16, 0)
ADD_BLOCKS(q5_1, 1, 0, 1)

/* Add 32 bytes of two codes each: the lower ones are a run, the upper ones the next. */
INLINE void add_q4_k(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                     const float *scales) {
    for (int row = 0; row < some; row++, block += apart, scales += RUNS)
        for (int run = 0; run < 8; run += 2) {
            const float *own = scales + run, *mores = own + RUNS / 2, *these = (const float *)given + LANES * run;
            for (int at = 0; at < LANES / 8; at++) {
                Eight bytes = eight_bytes(block + 16 + 16 * run + 8 * at);
                Part *sums = lanes[row].of + at;
                add_octet(way, sums, shifted(way, as_numbers(bytes & 15), own[0], mores[0]), these + 8 * at);
                add_octet(way, sums, shifted(way, as_numbers(bytes >> 4), own[1], mores[1]), these + LANES + 8 * at);
            }
        }
}

/* Where codes have bits in two places they are put together as bytes. */
typedef uint8_t Bytes __attribute__((vector_size(32), aligned(1), may_alias));

INLINE void add_run(int way, Lanes *lanes, Bytes codes, const float *given, const float *scales, const float *more) {
    int8_t laid[LANES] __attribute__((aligned(LANES)));
    *(Bytes *)laid = codes;
    LOADED_FROM(laid, LANES);
    for (int at = 0; at < LANES / 8; at++) {
        Part numbers = octet_of(laid + 8 * at);
        Part values = more ? shifted(way, numbers, *scales, *more) : numbers * scales[at / 2];
        add_octet(way, lanes->of + at, values, given + 8 * at);
    }
}

INLINE void add_q5_k(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                     const float *scales) {
    for (int row = 0; row < some; row++, block += apart, scales += RUNS) {
        Bytes fifth = *(const Bytes *)(block + 16);
#pragma GCC unroll 4
        for (int run = 0; run < 8; run += 2) {
            const float *own = scales + run, *mores = own + RUNS / 2, *these = (const float *)given + LANES * run;
            Bytes packed = *(const Bytes *)(block + 48 + 16 * run);
            Bytes first = (run < 4 ? fifth << (4 - run) : fifth >> (run - 4)) & 16;
            Bytes second = (run < 3 ? fifth << (3 - run) : fifth >> (run - 3)) & 16;
            add_run(way, lanes + row, (packed & 15) | first, these, own, mores);
            add_run(way, lanes + row, packed >> 4 | second, these + LANES, own + 1, mores + 1);
        }
    }
}

INLINE void add_q6_k(int way, int some, Lanes *lanes, const uint8_t *block, int64_t apart, const void *given,
                     const float *scales) {
    for (int row = 0; row < some; row++, block += apart, scales += RUNS)
        for (int half = 0; half < 2; half++) {
            const float *own = scales + 8 * half, *these = (const float *)given + 128 * half;
            const Bytes *packed = (const Bytes *)(block + 64 * half), upper = *(const Bytes *)(block + 128 + 32 * half);
            add_run(way, lanes + row, ((packed[0] & 15) | (upper << 4 & 48)) - 32, these, own, 0);
            add_run(way, lanes + row, ((packed[1] & 15) | (upper << 2 & 48)) - 32, these + LANES, own + 2, 0);
            add_run(way, lanes + row, (packed[0] >> 4 | (upper & 48)) - 32, these + 2 * LANES, own + 4, 0);
            add_run(way, lanes + row, (packed[1] >> 4 | (upper >> 2 & 48)) - 32, these + 3 * LANES, own + 6, 0);
        }
}
#endif

/* Have what lies behind so many bytes be on its way: a product of one row reads weights once, one after the other, and
   faster than a processor fetches them by itself. Intel's have more under way to the second cache than to the first; AMD's
   don't, and there weights go past the second cache, which keeps what the caller needs between products. Where nothing lies
   any more, nothing is fetched. */
#if defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
enum { AHEAD = 8192, NEARNESS = 0 };
#else
enum { AHEAD = 8192, NEARNESS = 2 };
#endif

INLINE void fetch(const uint8_t *packed, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(packed + at, 0, NEARNESS);
}

/* Rows that are read side by side are fetched one after the other, as they lie, while those before them are read. */
INLINE int64_t ahead_of(int64_t bytes) { return ((AHEAD - 1) / bytes + 1) * bytes; }

/* Rows of blocks that lie so many bytes apart, one or SIDE of them, times one row given. */

typedef void (*RowProduct)(const uint8_t *packed, int64_t apart, int64_t blocks, const void *given, float *made);

/* Of some blocks scales are unpacked before any is multiplied, which else would wait for each one's; not of single rows of
   small blocks, of which scales take less. */
#define ROW_PRODUCT(name, way, some, format, count, size, scales_of)                                         \
    static void name(const uint8_t *packed, int64_t apart, int64_t blocks, const void *given, float *made) { \
        enum { TOGETHER = some > 1 || count > LANES ? BLOCKS : 1, ROOM = some * RUNS + 8 };                  \
        Lanes lanes[some] = {0};                                                                             \
        float all[TOGETHER][ROOM], *scales = *all;                                                           \
        const uint8_t *later = packed + (some == 1 ? AHEAD : ahead_of(some * apart));                        \
        for (int64_t at = 0; at < blocks; at++, packed += size, later += some * size, scales += ROOM) {      \
            if (at % TOGETHER == 0) {                                                                        \
                scales = *all;                                                                               \
                for (int64_t next = 0; next < TOGETHER && at + next < blocks; next++)                        \
                    scales_of(some, packed + next * size, apart, all[next]);                                 \
            }                                                                                                \
            fetch(later, some * size);                                                                       \
            add_##format(way, some, lanes, packed, apart, given_at(way, given, at * count), scales);         \
        }                                                                                                    \
        for (int row = 0; row < some && !(way & KEPT); row++) made[row] = sum_of(lanes + row);               \
    }

#define FUNCTIONS_OF(way, name, some)                                               \
    ROW_PRODUCT(name##_q4_0_##way, way, some, q4_0, 32, 18, scales_of_blocks)       \
    ROW_PRODUCT(name##_q4_1_##way, way, some, q4_1, 32, 20, scales_and_mores)       \
    ROW_PRODUCT(name##_q5_0_##way, way, some, q5_0, 32, 22, scales_of_blocks)       \
    ROW_PRODUCT(name##_q5_1_##way, way, some, q5_1, 32, 24, scales_and_mores)       \
    ROW_PRODUCT(name##_q8_0_##way, way, some, q8_0, 32, 34, scales_of_blocks)       \
    ROW_PRODUCT(name##_q4_k_##way, way, some, q4_k, 256, 144, scales_of_k)          \
    ROW_PRODUCT(name##_q5_k_##way, way, some, q5_k, 256, 176, scales_of_k)          \
    ROW_PRODUCT(name##_q6_k_##way, way, some, q6_k, 256, 210, scales_of_q6_k)       \
    ROW_PRODUCT(name##_f32_##way, way, some, f32, 32, 128, no_scales)

#define ROW_FUNCTIONS(way) FUNCTIONS_OF(way, row_of, 1)
#define SIDE_FUNCTIONS(way) FUNCTIONS_OF(way, rows_of, SIDE)

#define ALL_OF(way, name)                                                                             \
    [way] = {name##_q4_0_##way, name##_q4_1_##way, name##_q5_0_##way, name##_q5_1_##way, name##_q8_0_##way, \
             name##_q4_k_##way, name##_q5_k_##way, name##_q6_k_##way, name##_f32_##way}
#define ROWS_OF(way) ALL_OF(way, row_of)
#define SIDES_OF(way) ALL_OF(way, rows_of)

ROW_FUNCTIONS(FLOATS)
SIDE_FUNCTIONS(FLOATS)
ROW_FUNCTIONS(KEPT)
WITH_PAIRS(ROW_FUNCTIONS(PAIRS))
WITH_PAIRS(SIDE_FUNCTIONS(PAIRS))
WITH_PAIRS(ROW_FUNCTIONS(KEPT_PAIRS))

static const RowProduct ROW[WAYS][9] = {
    ROWS_OF(FLOATS), ROWS_OF(KEPT), WITH_PAIRS(ROWS_OF(PAIRS), ROWS_OF(KEPT_PAIRS))
};

/* By SIDE rows. */
static const RowProduct ROWS[KEPT][9] = {SIDES_OF(FLOATS), WITH_PAIRS(SIDES_OF(PAIRS))};

/* How many values a block has, and how many bytes. */
typedef struct {
    int64_t values, bytes;
} Format;

static const Format FORMAT[] = {{32, 18},   {32, 20},   {32, 22},   {32, 24}, {32, 34},
                                {256, 144}, {256, 176}, {256, 210}, {32, 128}};

#define STORE(dtype, type)                                                                                    \
    INLINE void store_##dtype(const float *restrict values, void *restrict made, int64_t count) {             \
        type *restrict rounded = made;                                                                        \
        for (int64_t at = 0; at < count; at++) rounded[at] = to_##dtype(values[at]);                          \
    }

STORE(bfloat16, uint16_t)
STORE(float16, uint16_t)

enum { MOST = 1024 };

/* Rows of blocks, columns of them, of a format, which is their kind; each goes to the row of made that table tells;
   null: one after the other. */
void unpack_ggml(const Work *all) {
    const Format *form = &FORMAT[all->kind];
    const uint8_t *packed = all->codes;
    const int64_t *places = all->table;
    float values[MOST];
    for (int64_t row = 0; row < all->rows; row++) {
        int64_t place = places ? places[row] : row;
        for (int64_t block = 0, some; block < all->columns; block += some, packed += some * form->bytes) {
            some = all->columns - block < MOST / form->values ? all->columns - block : MOST / form->values;
            char *target = all->made + (place * all->columns + block) * form->values * SIZE_OF(all->dtype);
            ROW[KEPT][all->kind](packed, 0, some, all->dtype == FLOAT32 ? (float *)target : values, 0);
            if (all->dtype == BFLOAT16) store_bfloat16(values, target, some * form->values);
            if (all->dtype == FLOAT16) store_float16(values, target, some * form->values);
        }
    }
}

/* Weights that rest in rows: what works on them as they are told to the loop that unpacks them, each row of theirs being
   one or several of its. */

enum { GGML, SCALED, GROUPED };

/* work says how the weight rests; family what unpacks it. made has a number of each of rows for each of count rows given,
   of columns, at the place that places tells; null: one after the other. bias has what is added to those of each; null:
   nothing. What is given is float32, or bfloat16 in the ways of pairs and tiles; laid has room for it where it is to be laid
   out, for which enough rows are given; null: they are few. What is made is bfloat16 where it rounds. Threads take rows step
   by step, and each has room floats to unpack to. */
typedef struct {
    const Work *work;
    const void *given;
    void *made;
    float *rooms;
    void *laid;
    const int64_t *places;
    const float *values, *bias;
    int64_t family, way, rounds, rows, columns, count, step, room, next_row, next_room;
} Product;

/* Have sum be the product of a row and one of those given. */
INLINE void keep_sum(const Product *all, int64_t given, int64_t row, float sum) {
    int64_t place = all->places ? all->places[row] : row, at = given * all->rows + place;
    if (all->bias) sum += all->bias[place];
    if (all->rounds)
        ((uint16_t *)all->made)[at] = to_bfloat16(sum);
    else
        ((float *)all->made)[at] = sum;
}

static const float OF_FP4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
static const float OF_INT4[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

/* 32 codes of a kind as values, either half of them having its scale. */
INLINE Lanes of_scaled(int64_t kind, const uint8_t *codes, Table values, float low, float high) {
    if (kind == FP8) return of_fp8_codes(codes, low, high);
    if (kind == INT8) return of_codes((const int8_t *)codes, low, high);
    return of_nibbles(codes, values, kind == TABLE, low, high);
}

/* The same of FP8, some of which are no numbers, or whose scales are beyond all use. */
static __attribute__((noinline)) Lanes of_strange(const uint8_t *codes, float low, float high) {
    float values[LANES];
    fp8_float32(codes, low, values, 16);
    fp8_float32(codes + 16, high, values + 16, 16);
    return values_at(values);
}

/* The scales of some blocks, from one on: those that have one number above them together, then the next. It stands apart,
   since in each of the functions that walk over rows it takes a compiler twice as long as all else. */
APART void unpack_scales(const Work *work, int64_t block, int64_t some, float *restrict made) {
    int nested = work->above && work->scale_kind == OF_TABLE;
    for (int64_t at = 0, end; at < some; at = end) {
        int64_t run = nested ? (block + at) / work->above_run : 0, last = nested ? (run + 1) * work->above_run - block : some;
        const uint8_t *above = work->above ? work->above + 4 * run : 0;
        end = last < some ? last : some;
        switch (work->scale_kind) {
#define SCALES_OF(kind)                                                                                                  \
    case kind: {                                                                                                         \
        const Work own = {                                                                                               \
            .scales = work->scales, .scale_table = work->scale_table, .scale_kind = kind, .offset = work->offset};       \
        if (above)                                                                                                       \
            for (int64_t next = at; next < end; next++) made[next] = scale_at(&own, above, block + next);                \
        else                                                                                                             \
            for (int64_t next = at; next < end; next++) made[next] = scale_at(&own, 0, block + next);                    \
        break;                                                                                                           \
    }
            SCALES_OF(OF_BFLOAT16)
            SCALES_OF(OF_FLOAT16)
            SCALES_OF(OF_FLOAT32)
            SCALES_OF(OF_FP8)
            SCALES_OF(OF_E8M0)
            SCALES_OF(OF_EXPONENTS)
            SCALES_OF(OF_TABLE)
        }
    }
}

/* How many scales of a row are unpacked at once. */
enum { SCALES = 32 };

INLINE int all_finite(float times, const float *scales, int64_t count) {
    int finite = 1;
    for (int64_t at = 0; at < count; at++) finite &= is_finite(times * scales[at]);
    return finite;
}

/* Add so many columns of codes of some rows, which lie so far apart, and what they are multiplied by: each row has a scale for
   a block of so many columns, or one for either half of a run. Strange are those of which FP8 can't be taken for halves. */
INLINE void add_scaled(int way, int some, int64_t kind, int strange, Lanes *lanes, const uint8_t *codes, int64_t apart,
                       int64_t count, const float (*scales)[SCALES], int64_t width, Table values, const void *given,
                       const uint8_t *later) {
    int64_t each = kind >= FP4 ? 2 : 1, halves = width == LANES / 2, most = halves ? LANES : width, left = most;
    const float *own = *scales;
    for (int64_t column = 0; column < count; column += LANES, codes += LANES / each, later += some * LANES / each) {
        Shared these = shared_at(way, given_at(way, given, column));
        fetch(later, some * LANES / each);
#pragma GCC unroll 4
        for (int at = 0; at < some; at++) {
            const uint8_t *row = codes + at * apart;
            float low = own[at * SCALES], high = own[at * SCALES + halves];
            add_shared(way, lanes + at, strange ? of_strange(row, low, high) : of_scaled(kind, row, values, low, high), these);
        }
        left -= LANES;
        own += left ? 0 : 1 + halves, left = left ? left : most;
    }
}

/* Some rows of codes of a kind, one or SIDE, from one on: their products with those given, or no product, and the one's
   values there. Scales are unpacked of some blocks at a time, of a table as of others: runs of it lie one after the other. */
INLINE void rows_of_scaled(int way, int some, int64_t kind, const Product *all, int64_t row, const void *given, float *made) {
    const Work *work = all->work;
    int64_t width = work->block_columns, each = kind >= FP4 ? 2 : 1, blocks = (all->columns + width - 1) / width;
    int64_t lines = all->columns / work->columns, apart = all->columns / each;
    const uint8_t *codes = work->codes + row * apart, *later = codes + (some == 1 ? AHEAD : ahead_of(some * apart));
    const Table values = table_of(kind >= FP4 ? all->values : OF_INT4);
    float scales[SIDE][SCALES];
    Lanes lanes[SIDE] = {0};
    for (int64_t block = 0, more; block < blocks; block += more) {
        int64_t column = block * width, rest = all->columns - column;
        more = blocks - block < SCALES ? blocks - block : SCALES;
        int64_t span = rest < more * width ? rest : more * width;
        const void *these = given_at(way, given, column);
        int strange = 0;
        for (int at = 0; at < some; at++) {
            int64_t begin = lines > 1 ? (row + at) * lines : (row + at) / work->block_rows * work->across;
            unpack_scales(work, begin + block, more, scales[at]);
            if (kind == FP8) strange |= !(are_numbers(codes + at * apart, span) && all_finite(FP8_TIMES, scales[at], more));
        }
        if (strange)
            add_scaled(way, some, kind, 1, lanes, codes, apart, span, scales, width, values, these, later);
        else {
            for (int at = 0; kind == FP8 && at < some; at++)
                for (int64_t next = 0; next < more; next++) scales[at][next] *= FP8_TIMES;
            add_scaled(way, some, kind, 0, lanes, codes, apart, span, scales, width, values, these, later);
        }
        codes += span / each, later += some * span / each;
    }
    for (int at = 0; at < some && !(way & KEPT); at++) made[at] = sum_of(lanes + at);
}

/* Functions of their own, which a compiler does well by: all in one it may run out of registers. */
#define SCALED_FUNCTION(name, way, some, kind)                                                                       \
    static __attribute__((noinline)) void name##_##kind##_##way(const Product *all, int64_t row, const void *given,  \
                                                                float *made) {                                       \
        rows_of_scaled(way, some, kind, all, row, given, made);                                                      \
    }

#define SCALED_FUNCTIONS(name, way, some)                                                                 \
    SCALED_FUNCTION(name, way, some, FP8)                                                                 \
    SCALED_FUNCTION(name, way, some, INT8)                                                                \
    SCALED_FUNCTION(name, way, some, FP4)                                                                 \
    SCALED_FUNCTION(name, way, some, TABLE)                                                               \
                                                                                                          \
    static void name##_##way(const Product *all, int64_t row, const void *given, float *made) {           \
        switch (all->work->kind) {                                                                        \
            case FP8: name##_FP8_##way(all, row, given, made); break;                                     \
            case INT8: name##_INT8_##way(all, row, given, made); break;                                   \
            case TABLE: name##_TABLE_##way(all, row, given, made); break;                                 \
            default: name##_FP4_##way(all, row, given, made);                                             \
        }                                                                                                 \
    }

SCALED_FUNCTIONS(scaled_row, FLOATS, 1)
SCALED_FUNCTIONS(scaled_rows, FLOATS, SIDE)
SCALED_FUNCTIONS(scaled_row, KEPT, 1)
WITH_PAIRS(SCALED_FUNCTIONS(scaled_row, PAIRS, 1))
WITH_PAIRS(SCALED_FUNCTIONS(scaled_rows, PAIRS, SIDE))
WITH_PAIRS(SCALED_FUNCTIONS(scaled_row, KEPT_PAIRS, 1))

typedef void (*ScaledRows)(const Product *all, int64_t row, const void *given, float *made);

static const ScaledRows SCALED_ROW[WAYS] = {
    [FLOATS] = scaled_row_FLOATS, [KEPT] = scaled_row_KEPT,
    WITH_PAIRS([PAIRS] = scaled_row_PAIRS, [KEPT_PAIRS] = scaled_row_KEPT_PAIRS)
};

/* By SIDE rows. */
static const ScaledRows SCALED_ROWS[KEPT] = {[FLOATS] = scaled_rows_FLOATS, WITH_PAIRS([PAIRS] = scaled_rows_PAIRS)};

/* One row given times some of the weight's, one or SIDE, from row on. */
static void multiply_rows(const Product *all, int64_t row, int64_t some, const void *given, float *made) {
    const Work *work = all->work;
    if (all->family == SCALED) {
        if (some == SIDE)
            SCALED_ROWS[all->way](all, row, given, made);
        else
            for (int64_t at = 0; at < some; at++) SCALED_ROW[all->way](all, row + at, given, made + at);
        return;
    }
    int64_t width = work->columns * FORMAT[work->kind].bytes;
    const uint8_t *packed = work->codes + row * width;
    RowProduct one = ROW[all->way][work->kind], side = ROWS[all->way][work->kind];
    if (some == SIDE)
        side(packed, width, work->columns, given, made);
    else
        for (int64_t at = 0; at < some; at++) one(packed + at * width, width, work->columns, given, made + at);
}

static void unpack_row(const Product *all, int64_t row, char *room) {
    const Work *work = all->work;
    int64_t way = (all->way & PAIRS) | KEPT, width = work->columns * FORMAT[work->kind].bytes;
    if (all->family == SCALED)
        SCALED_ROW[way](all, row, room, 0);
    else
        ROW[way][work->kind](work->codes + row * width, width, work->columns, room, 0);
}

/* Where many rows are given, either side is laid out so that what is multiplied lies in one run: lines of BESIDE rows of a
   weight, or of AT_ONCE of those given, are taken apart into steps, of a number (or a pair of such) for each lane, and these
   into as many lanes as a register has. All steps of one part of the lanes follow each other, and in each the numbers of all
   lines. What is loaded of either side serves each line of the other, and all sums stay in registers. */
#ifdef __AVX512BW__
enum { BESIDE = 6 };
#elif defined(__AVX2__)
enum { BESIDE = 3 };
#else
enum { BESIDE = 2 };
#endif

enum { BYTES = sizeof(Part), PARTS = LANES / PART, STEP = PARTS * BYTES, SUMS = BESIDE * AT_ONCE * PART };

/* Some of the rows that are unpacked, and so many steps of them, fill a second cache; so many rows given share them, whose sums
   it holds too; and the first has what is laid out of AT_ONCE of these. */
enum { BLOCK = 24, SHARING = 16, ONE_RUN = 96 };

INLINE int64_t steps_of(int64_t way, int64_t columns) { return (columns * bytes_of(way) + STEP - 1) / STEP; }

/* The place of a line that is laid out beside others, from so many bytes of it on: of whole registers. */
INLINE char *laid_at(char *made, int64_t beside, int64_t steps, int64_t line, int64_t bytes) {
    int64_t part = bytes % STEP / BYTES, step = bytes / STEP;
    return made + ((line / beside * PARTS + part) * steps + step) * beside * BYTES + line % beside * BYTES;
}

/* Lay so many bytes of a line, from the first register of a step on, where its place begins. */
INLINE void lay_out(int64_t beside, int64_t steps, const char *line, int64_t bytes, char *made) {
    for (; bytes >= STEP; bytes -= STEP, line += STEP, made += beside * BYTES)
#pragma GCC unroll 4
        for (int64_t part = 0; part < PARTS; part++)
            *(LoosePart *)(made + part * steps * beside * BYTES) = *(const LoosePart *)(line + part * BYTES);
    for (; bytes > 0; bytes -= BYTES, line += BYTES, made += steps * beside * BYTES)
        *(LoosePart *)made = *(const LoosePart *)line;
}

INLINE Part part_at(const void *values) {
    Part part = *(const LoosePart *)values;
#if defined(__AVX512BW__)
    __asm__("" : "+v"(part)); /* to stay in its register, rather than be loaded anew for each use */
#elif defined(__AVX2__)
    __asm__("" : "+x"(part));
#endif
    return part;
}

/* What comes of products and a sum: of one in each lane, rounded once, or of pairs. */
INLINE Part fused(int way, Part one, Part two, Part sum) {
#if defined(__AVX512BW__)
    if (in_pairs(way)) return (Part)with_pairs((__m512)sum, (__m512i)one, (__m512i)two);
    return (Part)_mm512_fmadd_ps((__m512)one, (__m512)two, (__m512)sum);
#else
    return (void)way, octet_added(one, two, sum);
#endif
}

/* What comes of so many steps of BESIDE rows of a weight times AT_ONCE given, in one part of the lanes, is added to sums,
   which begin as zeros where these are the first. */
INLINE void add_products(int way, const char *values, const char *given, int64_t steps, int first, float *sums) {
    Part parts[BESIDE * AT_ONCE];
    LoosePart *made = (LoosePart *)sums;
#pragma GCC unroll 24
    for (int at = 0; at < BESIDE * AT_ONCE; at++) parts[at] = first ? (Part){0} : (Part)made[at];
    for (int64_t step = 0; step < steps; step++, values += BESIDE * BYTES, given += AT_ONCE * BYTES) {
        Part found[BESIDE];
#pragma GCC unroll 6
        for (int row = 0; row < BESIDE; row++) found[row] = part_at(values + row * BYTES);
#pragma GCC unroll 4
        for (int at = 0; at < AT_ONCE; at++) {
            Part these = part_at(given + at * BYTES);
#pragma GCC unroll 6
            for (int row = 0; row < BESIDE; row++) {
                Part *own = parts + row * AT_ONCE + at;
                *own = fused(way, found[row], these, *own);
            }
        }
    }
#pragma GCC unroll 24
    for (int at = 0; at < BESIDE * AT_ONCE; at++) made[at] = parts[at];
}

/* The rows begin to end, BLOCK at most, times count of those given, from first on, SHARING at most: all that is added up of
   some columns is done before the next ones. */
INLINE void multiply_block(int way, const Product *all, int64_t begin, int64_t end, const char *values, int64_t first,
                           int64_t count, float *sums) {
    int64_t columns = all->columns, steps = steps_of(way, columns), groups = (end - begin + BESIDE - 1) / BESIDE;
    for (int64_t from = 0, more; from < steps; from += more) {
        float *made = sums;
        more = steps - from < ONE_RUN ? steps - from : ONE_RUN;
        for (int64_t at = first; at < first + count; at += AT_ONCE)
            for (int64_t part = 0; part < PARTS; part++) {
                int64_t begins = from * STEP + part * BYTES, left = columns * bytes_of(way) - begins;
                const char *own = laid_at((char *)values, BESIDE, steps, 0, begins);
                const char *these = laid_at(all->laid, AT_ONCE, steps, at, begins);
                int64_t some = left < more * STEP ? (left + STEP - 1) / STEP : more;
                for (int64_t group = 0; group < groups; group++, own += PARTS * steps * BESIDE * BYTES, made += SUMS)
                    add_products(way, own, these, some, !from, made);
            }
    }
    for (int64_t at = first; at < first + count; at += AT_ONCE, sums += PARTS * groups * SUMS)
        for (int64_t row = 0; row < end - begin; row++)
            for (int64_t given = 0; given < AT_ONCE && at + given < first + count; given++) {
                const float *own = sums + row / BESIDE * SUMS + (row % BESIDE * AT_ONCE + given) * PART;
                float lanes[LANES];
                for (int64_t part = 0; part < PARTS; part++)
                    *(LoosePart *)(lanes + part * PART) = *(const LoosePart *)(own + part * groups * SUMS);
                Lanes found = values_at(lanes);
                keep_sum(all, at + given, begin + row, sum_of(&found));
            }
}

/* The rows begin to end, whose values are laid out, times all rows given. */
INLINE void multiply_unpacked_of(int way, const Product *all, int64_t begin, int64_t end, const char *values, float *sums) {
    for (int64_t row = begin, last; row < end; row = last) {
        last = row + BLOCK < end ? row + BLOCK : end;
        const char *own = values + (row - begin) * steps_of(way, all->columns) * STEP;
        for (int64_t first = 0; first < all->count; first += SHARING)
            multiply_block(way, all, row, last, own, first, all->count - first < SHARING ? all->count - first : SHARING, sums);
    }
}

static void multiply_unpacked(const Product *all, int64_t begin, int64_t end, const char *values, float *sums) {
    if (in_pairs(all->way))
        multiply_unpacked_of(PAIRS, all, begin, end, values, sums);
    else
        multiply_unpacked_of(FLOATS, all, begin, end, values, sums);
}

/* Clear what no row fills of the last BESIDE ones that are laid out, and return where the room of all ends. */
static char *clear_last(const Product *all, int64_t rows, char *values) {
    int64_t bytes = steps_of(all->way, all->columns) * STEP;
    if (rows % BESIDE) memset(values + rows / BESIDE * BESIDE * bytes, 0, (size_t)(BESIDE * bytes));
    return values + (rows + BESIDE - 1) / BESIDE * BESIDE * bytes;
}

/* Rows are unpacked one after the other where there is room for one, behind the sums, and laid out before these. */
static void multiply_in_blocks(const Product *all, int64_t begin, int64_t end, char *room) {
    int64_t line = all->columns * bytes_of(all->way), steps = steps_of(all->way, all->columns);
    int64_t most = (all->room * 4 - BLOCK * SHARING * STEP) / (steps * STEP) - 1;
    char *sums = room + most * steps * STEP, *unpacked = sums + BLOCK * SHARING * STEP;
    for (int64_t first = begin, last; first < end; first = last) {
        last = first + most < end ? first + most : end;
        clear_last(all, last - first, room);
        for (int64_t row = first; row < last; row++) {
            unpack_row(all, row, unpacked);
            lay_out(BESIDE, steps, unpacked, line, laid_at(room, BESIDE, steps, row - first, 0));
        }
        multiply_unpacked(all, first, last, room, (float *)sums);
    }
}

/* The rows begin to end times all rows given, of which a few don't make it worth the while to unpack anything. */
static void multiply_in_rows(const Product *all, int64_t begin, int64_t end, char *room) {
    if (all->laid) {
        multiply_in_blocks(all, begin, end, room);
        return;
    }
    for (int64_t row = begin, some; row < end; row += some) {
        some = row + SIDE <= end ? SIDE : 1;
        for (int64_t at = 0; at < all->count; at++) {
            float found[SIDE];
            multiply_rows(all, row, some, given_at(all->way, all->given, at * all->columns), found);
            for (int64_t one = 0; one < some; one++) keep_sum(all, at, row + one, found[one]);
        }
    }
}

/* A square of as many lines as they have numbers, each a register, made columns. */
INLINE void transpose(const LoosePart *lines, LoosePart *made) {
#if defined(__AVX512BW__)
    __m512i one[PART], two[PART];
    for (int at = 0; at < PART; at += 2) {
        one[at] = _mm512_unpacklo_epi32((__m512i)lines[at], (__m512i)lines[at + 1]);
        one[at + 1] = _mm512_unpackhi_epi32((__m512i)lines[at], (__m512i)lines[at + 1]);
    }
    for (int at = 0; at < PART; at += 4)
        for (int half = 0; half < 2; half++) {
            two[at + 2 * half] = _mm512_unpacklo_epi64(one[at + half], one[at + 2 + half]);
            two[at + 2 * half + 1] = _mm512_unpackhi_epi64(one[at + half], one[at + 2 + half]);
        }
    for (int at = 0; at < 4; at++) {
        one[at] = _mm512_shuffle_i32x4(two[at], two[4 + at], 0x88);
        one[4 + at] = _mm512_shuffle_i32x4(two[at], two[4 + at], 0xdd);
        one[8 + at] = _mm512_shuffle_i32x4(two[8 + at], two[12 + at], 0x88);
        one[12 + at] = _mm512_shuffle_i32x4(two[8 + at], two[12 + at], 0xdd);
    }
    for (int at = 0; at < 4; at++)
        for (int half = 0; half < 2; half++) {
            made[4 * half + at] = (LoosePart)_mm512_shuffle_i32x4(one[4 * half + at], one[8 + 4 * half + at], 0x88);
            made[8 + 4 * half + at] = (LoosePart)_mm512_shuffle_i32x4(one[4 * half + at], one[8 + 4 * half + at], 0xdd);
        }
#elif defined(__AVX2__)
    __m256 one[PART], two[PART];
    for (int at = 0; at < PART; at += 2) {
        one[at] = _mm256_unpacklo_ps((__m256)lines[at], (__m256)lines[at + 1]);
        one[at + 1] = _mm256_unpackhi_ps((__m256)lines[at], (__m256)lines[at + 1]);
    }
    for (int at = 0; at < PART; at += 4)
        for (int half = 0; half < 2; half++) {
            __m256d lower = (__m256d)one[at + half], upper = (__m256d)one[at + 2 + half];
            two[at + 2 * half] = (__m256)_mm256_unpacklo_pd(lower, upper);
            two[at + 2 * half + 1] = (__m256)_mm256_unpackhi_pd(lower, upper);
        }
    for (int at = 0; at < PART / 2; at++) {
        made[at] = (LoosePart)_mm256_permute2f128_ps(two[at], two[4 + at], 0x20);
        made[4 + at] = (LoosePart)_mm256_permute2f128_ps(two[at], two[4 + at], 0x31);
    }
#else
    for (int line = 0; line < PART; line++)
        for (int at = 0; at < PART; at++) made[at][line] = lines[line][at];
#endif
}

/* Products in tiles (AMX): of up to sixteen rows of 32 columns each of both sides, one of which lies in pairs of columns.
   A tile's sums of the first and of the second columns of pairs begin as zeros and are added up apart, first to last, each
   product and sum rounded once; then the two are added, and that to the sum of the tiles before. So all bits are the same
   for one row given and for many, and on either side. */

typedef struct {
    uint8_t kind, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

/* Rows that are unpacked for tiles lie so many bytes further apart than they are long: columns often are a power of two, and
   what lies so far apart has one place in a cache. */
enum { TILE = 16, TILE_BYTES = 1024, LINE = 64, STRIPS = 4, PADDING = 64 };

#if HAS_TILES

INLINE void set_tiles(const Tiles *all) { __asm__ volatile("ldtilecfg %0" : : "m"(*all)); }

/* Four tiles of sums, and of what is multiplied one to four: those on the left have so many rows, those on the right so
   many columns of sums. */
static void shape_tiles(int64_t rows, int64_t across) {
    Tiles all = {.kind = 1};
    for (int at = 0; at < 8; at++) {
        int right = at >= 6, sums = at < 4;
        all.rows[at] = (uint8_t)(right ? TILE : rows);
        all.bytes[at] = (uint16_t)(right || sums ? 4 * across : LINE);
    }
    set_tiles(&all);
}

/* Others' shapes of tiles are as they were when a product is done. */
static Tiles begin_tiles(const Product *all) {
    Tiles before = {0};
    if (all->way == TILES) __asm__ volatile("sttilecfg %0" : "=m"(before));
    return before;
}

static void end_tiles(const Product *all, const Tiles *before) {
    if (all->way == TILES) set_tiles(before);
}

/* Where one side lies: its lines so far apart, each tile of columns so far behind the one before, as are its rows' tiles. */
typedef struct {
    const char *at;
    int64_t line, step, next;
} Side;

typedef float Sums[TILE][TILE];

/* What is written before is there for tiles to load, which compilers aren't told of. */
INLINE void settle(void) { __asm__ volatile("" : : : "memory"); }

INLINE void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void store_sums(Sums *sums, int64_t across) {
    size_t line = 4 * (size_t)across;
    _tile_stored(0, sums[0], line);
    _tile_stored(1, sums[1], line);
    _tile_stored(2, sums[2], line);
    _tile_stored(3, sums[3], line);
}

/* Two tiles of rows of either side, so many tiles of columns of each. */
INLINE void add_two_by_two(Side left, Side right, int64_t count) {
    settle();
    for (int64_t at = 0; at < count; at++, left.at += left.step, right.at += right.step) {
        _tile_loadd(4, left.at, left.line);
        _tile_loadd(5, left.at + left.next, left.line);
        _tile_loadd(6, right.at, right.line);
        _tile_loadd(7, right.at + right.next, right.line);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* Up to four of the left times one of the right. */
INLINE void add_strips(Side left, Side right, int64_t count, int64_t strips) {
    settle();
    for (int64_t at = 0; at < count; at++, left.at += left.step, right.at += right.step) {
        _tile_loadd(6, right.at, right.line);
        _tile_loadd(4, left.at, left.line);
        _tile_dpbf16ps(0, 4, 6);
        if (strips > 1) {
            _tile_loadd(5, left.at + left.next, left.line);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (strips > 2) {
            _tile_loadd(4, left.at + 2 * left.next, left.line);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (strips > 3) {
            _tile_loadd(5, left.at + 3 * left.next, left.line);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
}

/* One of the left times four of the right. */
INLINE void add_across(Side left, Side right, int64_t count) {
    settle();
    for (int64_t at = 0; at < count; at++, left.at += left.step, right.at += right.step) {
        _tile_loadd(4, left.at, left.line);
        _tile_loadd(6, right.at, right.line);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right.at + right.next, right.line);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, right.at + 2 * right.next, right.line);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, right.at + 3 * right.next, right.line);
        _tile_dpbf16ps(3, 4, 7);
    }
}

/* What is given, of sixteen rows or as many as are left, laid out in pairs of columns: those of one place lie side by side.
   One row lies so as it is. */
static void lay_pairs_out(Product *all, int64_t first, int64_t some) {
    int64_t pairs = all->columns / 2;
    const int32_t *given = (const int32_t *)all->given + first * pairs;
    int32_t *made = (int32_t *)all->laid + first * pairs;
    if (some == TILE)
        for (int64_t at = 0; at < pairs; at += TILE) {
            __m512i lines[TILE], columns[TILE];
            for (int row = 0; row < TILE; row++) lines[row] = _mm512_loadu_si512(given + row * pairs + at);
            transpose((const LoosePart *)lines, (LoosePart *)columns);
            for (int pair = 0; pair < TILE; pair++) _mm512_storeu_si512(made + (at + pair) * TILE, columns[pair]);
        }
    else
        for (int64_t row = 0; row < some; row++)
            for (int64_t at = 0; at < pairs; at++) made[at * some + row] = given[row * pairs + at];
}

INLINE Side given_side(const Product *all, int64_t first, int64_t across) {
    int64_t pairs = all->columns / 2;
    const char *at = (const char *)all->laid + 4 * first * pairs;
    return (Side){at, 4 * across, 4 * across * TILE, 4 * across * pairs};
}

/* The sums of up to sixteen rows, from one on, and a row given. */
INLINE void keep_line(const Product *all, int64_t given, int64_t row, int64_t some, const float *sums) {
    if (all->places || some < TILE) {
        for (int64_t at = 0; at < some; at++) keep_sum(all, given, row + at, sums[at]);
        return;
    }
    int64_t place = given * all->rows + row;
    float line[TILE];
    for (int at = 0; at < TILE; at++) line[at] = all->bias ? sums[at] + all->bias[row + at] : sums[at];
    if (all->rounds)
        store_bfloat16(line, (uint16_t *)all->made + place, TILE);
    else
        memcpy((float *)all->made + place, line, sizeof line);
}

/* The sums of rows, from one on to the end, sixteen at most, and across rows given from first on. */
static void keep_tile(const Product *all, int64_t row, int64_t end, int64_t first, int64_t across, const float *sums) {
    int64_t some = end - row < TILE ? end - row : TILE;
    if (across == 1) {
        keep_line(all, first, row, some, sums);
        return;
    }
    Sums turned __attribute__((aligned(LINE)));
    if (across == TILE)
        transpose((const LoosePart *)sums, (LoosePart *)turned);
    else
        for (int64_t at = 0; at < TILE; at++)
            for (int64_t given = 0; given < across; given++) turned[given][at] = sums[at * across + given];
    for (int64_t given = 0; given < across; given++) keep_line(all, first + given, row, some, turned[given]);
}

/* Rows of a weight, unpacked to room, times some rows given, from one on: those of one tile of the right, or of two. */
INLINE void multiply_strips(const Product *all, int64_t begin, int64_t end, const char *room, int64_t given, int64_t across,
                            int two) {
    int64_t apart = 2 * all->columns + PADDING, steps = all->columns / LANES, rows = two ? 2 : STRIPS;
    Sums sums[STRIPS] __attribute__((aligned(LINE)));
    Side right = given_side(all, given, across);
    for (int64_t row = begin; row < end; row += rows * TILE) {
        Side left = {room + (row - begin) * apart, apart, LINE, TILE * apart};
        clear_sums();
        if (two)
            add_two_by_two(left, right, steps);
        else
            add_strips(left, right, steps, (end - row + TILE - 1) / TILE);
        store_sums(sums, across);
        for (int64_t at = 0; at < STRIPS; at++) {
            int64_t own = row + (two ? at / 2 : at) * TILE, first = given + (two ? at % 2 : 0) * TILE;
            if (own < end) keep_tile(all, own, end, first, across, (const float *)sums[at]);
        }
    }
}

/* Rows of a weight in tiles: as many as there is room for are unpacked, whole ones, and serve all that is given. */
static void multiply_rows_in_tiles(const Product *all, int64_t begin, int64_t end, char *room) {
    int64_t apart = 2 * all->columns + PADDING, most = all->room * 4 / apart, whole = all->count / TILE * TILE;
    for (int64_t first = begin, last; first < end; first = last) {
        last = first + most < end ? first + most : end;
        for (int64_t row = first; row < last; row++) unpack_row(all, row, room + (row - first) * apart);
        if (whole) shape_tiles(TILE, TILE);
        for (int64_t given = 0; given < whole; given += 2 * TILE)
            multiply_strips(all, first, last, room, given, TILE, given + TILE < whole);
        if (whole == all->count) continue;
        shape_tiles(TILE, all->count - whole);
        multiply_strips(all, first, last, room, whole, all->count - whole, 0);
    }
}
#else
static Tiles begin_tiles(const Product *all) { return (void)all, (Tiles){0}; }

static void end_tiles(const Product *all, const Tiles *before) { (void)all, (void)before; }

static void lay_pairs_out(Product *all, int64_t first, int64_t some) { (void)all, (void)first, (void)some; }
#endif

/* Weights that rest in columns: integers of two to eight bits, as GPTQ and AWQ have them. A line at rest is one input of
   all rows, or numbers that hold several; so WIDE rows are multiplied side by side, by LANES inputs at a time.

   Of work, kind is the bits of a code, columns are inputs and rows outputs; each of across groups, of block_columns
   inputs or as table tells them, has scales and, above, zeros. These rest one less than they mean where above_run is set.
   Codes of AWQ are told by inside. */

enum { WIDE = 64, GIVEN = 4 };

/* For so many rows given a weight is unpacked, some of its rows at a time: it is sooner from about as many on. */
int32_t given_to_unpack(int32_t in_columns) { return in_columns && PART == 16 ? 12 : AT_ONCE; }

typedef struct {
    float scales[WIDE], zeros[WIDE];
} Group;

static const Eight SHIFTS = {0, 16, 4, 20, 8, 24, 12, 28};

/* What is added to whole numbers of zeros that rest one less: for three bits it goes round three numbers. */
INLINE uint32_t ones_of(int64_t bits, int64_t word) {
    static const uint32_t OF_THREE[3] = {0x24924924, 0x92492492, 0x49249249};
    return bits == 3 ? OF_THREE[word % 3] : bits == 2 ? 0x55555555 : bits == 4 ? 0x11111111 : 0x01010101;
}

INLINE uint32_t word_at(const uint8_t *words, int64_t at) {
    uint32_t word;
    memcpy(&word, words + 4 * at, sizeof word);
    return word;
}

/* Zeros of wide rows, of those in a line of packed ones the first and on. */
INLINE void unpack_zeros(const Work *work, int64_t bits, const uint8_t *line, int64_t wide, float *restrict zeros) {
    uint32_t words[17] = {0}, ones = work->above_run != 0, places[WIDE];
    int64_t count = wide * bits / 32;
    for (int64_t word = 0; word < count; word++) words[word] = word_at(line, word) + ones * ones_of(bits, word);
    if (bits == 3)
        for (int64_t at = 0; at < wide; at++) {
            uint64_t both = words[at * bits / 32] | (uint64_t)words[at * bits / 32 + 1] << 32;
            places[at] = (uint32_t)(both >> at * bits % 32);
        }
    else
        for (int64_t at = 0; at < wide; at++) places[at] = words[at * bits / 32] >> at * bits % 32;
    for (int64_t at = 0; at < wide; at++) zeros[at] = (float)(int32_t)(places[at] & ((1u << bits) - 1));
}

/* The codes of AWQ in words: each of eight rows, in an order of its own. */
INLINE void apart(const uint8_t *words, int64_t wide, uint32_t *restrict codes) {
    for (int64_t at = 0; at < wide; at += 8) {
        Eight eight = (word_at(words, at / 8) - (Eight){0}) >> SHIFTS & 15;
        memcpy(codes + at, &eight, sizeof eight);
    }
}

/* Scales and zeros of all groups, of wide rows from first on: these are whole numbers of packed ones. */
static void unpack_groups(const Work *work, int64_t first, int64_t wide, Group *groups) {
    int64_t bits = work->kind, width = work->rows * bits / 8;
    for (int64_t group = 0; group < work->across; group++) {
        const uint8_t *line = work->above + group * width + first * bits / 8;
        float *zeros = groups[group].zeros, *scales = groups[group].scales;
        const Work half = {.scales = work->scales, .scale_kind = OF_FLOAT16};
        if (work->scale_kind == OF_FLOAT16)
            for (int64_t at = 0; at < wide; at++) scales[at] = stored_scale(&half, group * work->rows + first + at);
        else
            for (int64_t at = 0; at < wide; at++) scales[at] = stored_scale(work, group * work->rows + first + at);
        if (work->inside) {
            uint32_t codes[WIDE];
            apart(line, wide, codes);
            for (int64_t at = 0; at < wide; at++) zeros[at] = (float)(int32_t)codes[at];
        }
        else if (bits == 2) unpack_zeros(work, 2, line, wide, zeros);
        else if (bits == 3) unpack_zeros(work, 3, line, wide, zeros);
        else if (bits == 4) unpack_zeros(work, 4, line, wide, zeros);
        else unpack_zeros(work, 8, line, wide, zeros);
    }
}

INLINE const Group *group_of(const Work *work, const Group *groups, int64_t input) {
    const int32_t *order = work->table;
    return groups + (order ? order[input] : input / work->block_columns);
}

#ifdef __AVX2__
enum { AWQ = 0 };

typedef uint32_t Words __attribute__((vector_size(4 * PART)));
typedef uint32_t LooseWords __attribute__((vector_size(4 * PART), aligned(4), may_alias));

/* Whole numbers under 2^23 become this and themselves where its bits are set: so zeros are less by it, which is exact. */
#define AS_NUMBER 0x1p23f

/* What is of as many rows as a register has numbers. */
typedef struct {
    Part zeros, scales;
} Rows;

INLINE Rows rows_at(const Group *group, int64_t row) {
    return (Rows){*(const LoosePart *)(group->zeros + row) + AS_NUMBER, *(const LoosePart *)(group->scales + row)};
}

/* The codes of an input of a run, which are the lowest bits, among others: of GPTQ a number has those of neighbouring inputs,
   of AWQ those of neighbouring rows. Lines lie so many bytes apart. */
INLINE Words codes_at(int64_t bits, const uint8_t *line, int64_t width, int64_t input) {
    if (bits == AWQ) {
#ifdef __AVX512BW__
        const __m512i words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const __m512i shifts = _mm512_broadcast_i64x4((__m256i)SHIFTS);
        __m512i both = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)(line + input * width)));
        return (Words)_mm512_srlv_epi32(_mm512_permutexvar_epi32(words, both), shifts);
#else
        return (word_at(line + input * width, 0) - (Words){0}) >> SHIFTS;
#endif
    }
    uint32_t shift = (uint32_t)(input * bits % 32);
    const uint8_t *words = line + input * bits / 32 * width;
    Words codes = *(const LooseWords *)words >> shift;
    return shift + bits <= 32 ? codes : codes | *(const LooseWords *)(words + width) << (32 - shift);
}

INLINE Part values_at_input(int64_t bits, const uint8_t *line, int64_t width, int64_t input, Rows rows) {
    const Words mask = (1u << (bits == AWQ ? 4 : bits)) - 1 - (Words){0}, number = (Words)(AS_NUMBER - (Part){0});
    Words codes = codes_at(bits, line, width, input);
#ifdef __AVX512BW__
    Words numbers = (Words)_mm512_ternarylogic_epi32((__m512i)codes, (__m512i)mask, (__m512i)number, 0xea);
#else
    Words numbers = (codes & mask) | number;
#endif
    return ((Part)numbers - rows.zeros) * rows.scales;
}

/* LANES inputs of WIDE rows, as values, of AWQ. */
INLINE void values_of_wide_awq(const Work *work, const Group *groups, int64_t input, int64_t first,
                               float (*restrict values)[WIDE]) {
    const Group *group = 0;
    Rows rows[WIDE / PART];
    int64_t apart = work->rows / 2;
    for (int64_t at = 0; at < LANES; at++) {
        const uint8_t *line = work->codes + (input + at) * apart + first / 2;
        const Group *own = group_of(work, groups, input + at);
        __builtin_prefetch(line + LANES * apart);
        for (int part = 0; own != group && part < WIDE / PART; part++) rows[part] = rows_at(own, PART * part);
        group = own;
#pragma GCC unroll 8
        for (int part = 0; part < WIDE / PART; part++)
            *(LoosePart *)(values[at] + PART * part) = values_at_input(AWQ, line + PART / 2 * part, 0, 0, rows[part]);
    }
}
#endif

/* LANES inputs of wide rows, as values: of GPTQ, whose numbers have codes of neighbouring inputs. */
INLINE void values_of_gptq(const Work *work, int64_t bits, const Group *groups, int64_t input, int64_t first, int64_t wide,
                           float (*restrict values)[WIDE]) {
    uint32_t words[9][WIDE];
    if (wide < WIDE) memset(words, 0, sizeof words);
    const uint8_t *line = work->codes + 4 * (input * bits / 32 * work->rows + first);
    for (int64_t word = 0; word < bits; word++, line += 4 * work->rows) {
        memcpy(words[word], line, 4 * (size_t)wide);
        for (int64_t at = 0; at < wide; at += 16) __builtin_prefetch(line + 4 * (bits * work->rows + at));
    }
    for (int64_t at = 0; at < LANES; at++) {
        const Group *group = group_of(work, groups, input + at);
        int64_t word = at * bits / 32, shift = at * bits % 32, over = shift + bits > 32;
        for (int row = 0; row < WIDE; row++) {
            uint32_t code = words[word][row] >> shift;
            if (bits == 3 && over) code |= words[word + 1][row] << (32 - shift);
            values[at][row] = ((float)(int32_t)(code & ((1u << bits) - 1)) - group->zeros[row]) * group->scales[row];
        }
    }
}

/* Of AWQ, whose numbers have codes of neighbouring rows. */
static void values_of_awq(const Work *work, const Group *groups, int64_t input, int64_t first, int64_t wide,
                          float (*restrict values)[WIDE]) {
    uint32_t codes[WIDE] = {0};
    for (int64_t at = 0; at < LANES; at++, input++) {
        const Group *group = group_of(work, groups, input);
        const uint8_t *line = work->codes + (input * work->rows + first) / 2;
        __builtin_prefetch(line + LANES * work->rows / 2);
        apart(line, wide, codes);
        for (int row = 0; row < WIDE; row++)
            values[at][row] = ((float)(int32_t)codes[row] - group->zeros[row]) * group->scales[row];
    }
}

static void values_of_columns(const Work *work, const Group *groups, int64_t input, int64_t first, int64_t wide,
                              float (*restrict values)[WIDE]) {
#ifdef __AVX2__
    if (work->inside && wide == WIDE) {
        values_of_wide_awq(work, groups, input, first, values);
        return;
    }
#endif
    if (work->inside) {
        values_of_awq(work, groups, input, first, wide, values);
        return;
    }
    switch (work->kind) {
        case 2: values_of_gptq(work, 2, groups, input, first, wide, values); break;
        case 3: values_of_gptq(work, 3, groups, input, first, wide, values); break;
        case 4: values_of_gptq(work, 4, groups, input, first, wide, values); break;
        default: values_of_gptq(work, 8, groups, input, first, wide, values);
    }
}

/* The sums of wide rows, whose lanes are added in halves. */
static void keep_wide(const Product *all, int64_t first, int64_t wide, int64_t at, float (*restrict lanes)[WIDE]) {
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            for (int row = 0; row < WIDE; row++) lanes[lane][row] += lanes[lane + half][row];
    for (int64_t row = 0; row < wide; row++) keep_sum(all, at, first + row, lanes[0][row]);
}

/* wide rows from first on, WIDE at most, times some rows given, GIVEN at most. */
static void multiply_tile(const Product *all, const Group *groups, int64_t first, int64_t wide, int64_t from, int64_t some) {
    float lanes[GIVEN][LANES][WIDE], values[LANES][WIDE] = {{0}};
    memset(lanes, 0, (size_t)some * sizeof *lanes);
    for (int64_t input = 0; input < all->columns; input += LANES) {
        values_of_columns(all->work, groups, input, first, wide, values);
        for (int64_t at = 0; at < some; at++) {
            const float *given = given_at(FLOATS, all->given, (from + at) * all->columns + input);
            for (int lane = 0; lane < LANES; lane++)
                for (int row = 0; row < WIDE; row++)
                    lanes[at][lane][row] = __builtin_fmaf(values[lane][row], given[lane], lanes[at][lane][row]);
        }
    }
    for (int64_t at = 0; at < some; at++) keep_wide(all, first, wide, from + at, lanes[at]);
}

#ifdef __AVX512BW__
/* Numbers of sixteen rows for two inputs, rounded, side by side. */
INLINE __m512i beside_each_other(__m512 one, __m512 two) {
    const __m512i beside = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                            20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(beside, rounded((Lanes){one, two}));
}
#endif

#ifdef __AVX2__
/* One row given, times WIDE rows: as many of these as a register has numbers and so many of the lanes at a time, whose sums
   stay in registers for so many runs of inputs. */
enum { STAYING = PART, SHARES = LANES / STAYING, STAY = 16 };

/* Add the products of so many inputs of a run to sums, in the way of floats those of a share of the run; of says their groups,
   of which alike inputs have one. */
INLINE void add_inputs(int way, int64_t bits, int alike, const uint8_t *line, int64_t width, const Group **of, int64_t row,
                       int64_t share, const void *given, Part *sums) {
    Rows rows = rows_at(*of, row);
#pragma GCC unroll 16
    for (int at = 0; at < STAYING; at++) {
        int64_t input = in_pairs(way) ? 2 * at : share * STAYING + at;
        if (!alike) rows = rows_at(of[input], row);
        Part values = values_at_input(bits, line, width, input, rows);
#ifdef __AVX512BW__
        if (in_pairs(way)) {
            int32_t both;
            memcpy(&both, given_at(way, given, input), sizeof both);
            if (!alike) rows = rows_at(of[input + 1], row);
            __m512i pairs = beside_each_other((__m512)values, (__m512)values_at_input(bits, line, width, input + 1, rows));
            sums[at] = (Part)with_pairs((__m512)sums[at], pairs, _mm512_set1_epi32(both));
            continue;
        }
#endif
        sums[at] = fused(FLOATS, values, ((const float *)given)[input] - (Part){0}, sums[at]);
    }
}

/* Lines of numbers that lie far apart have one place in a first cache: those of some runs are laid beside each other, while
   the second cache fetches the next ones. In pairs, runs take turns at the halves of lanes. */
INLINE void multiply_one_of(int way, int64_t bits, int alike, const Product *all, const Group *groups, int64_t first,
                            int64_t from) {
    enum { MOST_BITS = 8, PARTS = SHARES * WIDE / PART };
    const Work *work = all->work;
    const char *given = given_at(way, all->given, from * all->columns);
    float lanes[LANES][WIDE] __attribute__((aligned(64))) = {{0}};
    uint8_t laid[STAY * MOST_BITS * 4 * WIDE] __attribute__((aligned(64)));
    const Group *of[STAY * LANES];
    int64_t apart = bits == AWQ ? work->rows / 2 : 4 * work->rows, width = bits == AWQ ? WIDE / 2 : 4 * WIDE;
    int64_t each = bits == AWQ ? LANES : bits, runs = all->columns / LANES, turns = in_pairs(way) ? 2 : 1;
    int64_t start = bits == AWQ ? first / 2 : 4 * first;
    const uint8_t *lines = work->codes + start;
    for (int64_t begin = 0, some; begin < runs; begin += some) {
        some = runs - begin < STAY ? runs - begin : STAY;
        for (int64_t line = 0; line < some * each; line++, lines += apart) memcpy(laid + line * width, lines, (size_t)width);
        const uint8_t *later = begin + some < runs ? lines : work->codes + start + width;
        for (int64_t input = 0; input < some * LANES; input += alike ? LANES : 1)
            of[input] = group_of(work, groups, begin * LANES + input);
#pragma GCC unroll 1
        for (int64_t part = 0; part < PARTS; part++) {
            int64_t row = part / SHARES * PART, share = part % SHARES;
            const uint8_t *own = laid + (bits == AWQ ? row / 2 : 4 * row);
            Part sums[STAYING];
            for (int64_t line = part; line < some * each; line += PARTS)
                for (int64_t byte = 0; byte < width; byte += 64) __builtin_prefetch(later + line * apart + byte, 0, 2);
#pragma GCC unroll 16
            for (int at = 0; at < STAYING; at++) sums[at] = *(const LoosePart *)(lanes[share * STAYING + at] + row);
            for (int64_t run = turns == 2 ? (share + begin) % 2 : 0; run < some; run += turns) {
                const void *these = given_at(way, given, (begin + run) * LANES);
                const uint8_t *line = own + run * each * width;
                switch (SHARES == 4 ? share : -1) { /* as a constant, so that places of codes in their numbers are ones too */
                    case 0: add_inputs(way, bits, alike, line, width, of + run * LANES, row, 0, these, sums); break;
                    case 1: add_inputs(way, bits, alike, line, width, of + run * LANES, row, 1, these, sums); break;
                    case 2: add_inputs(way, bits, alike, line, width, of + run * LANES, row, 2, these, sums); break;
                    case 3: add_inputs(way, bits, alike, line, width, of + run * LANES, row, 3, these, sums); break;
                    default: add_inputs(way, bits, alike, line, width, of + run * LANES, row, share, these, sums);
                }
            }
#pragma GCC unroll 16
            for (int at = 0; at < STAYING; at++) *(LoosePart *)(lanes[share * STAYING + at] + row) = sums[at];
        }
    }
    keep_wide(all, first, WIDE, from, lanes);
}

#define MULTIPLY_ONE(name, way, alike)                                                               \
    static void name(const Product *all, const Group *groups, int64_t first, int64_t from) {         \
        switch (all->work->inside ? AWQ : all->work->kind) {                                         \
            case AWQ: multiply_one_of(way, AWQ, alike, all, groups, first, from); break;             \
            case 2: multiply_one_of(way, 2, alike, all, groups, first, from); break;                 \
            case 3: multiply_one_of(way, 3, alike, all, groups, first, from); break;                 \
            case 4: multiply_one_of(way, 4, alike, all, groups, first, from); break;                 \
            default: multiply_one_of(way, 8, alike, all, groups, first, from);                       \
        }                                                                                            \
    }

MULTIPLY_ONE(multiply_one_FLOATS, FLOATS, 0)
MULTIPLY_ONE(multiply_alike_FLOATS, FLOATS, 1)
WITH_PAIRS(MULTIPLY_ONE(multiply_one_PAIRS, PAIRS, 0))
WITH_PAIRS(MULTIPLY_ONE(multiply_alike_PAIRS, PAIRS, 1))

/* By whether inputs of a run have one group. */
static void (*const MULTIPLY_ONE_OF[KEPT][2])(const Product *all, const Group *groups, int64_t first, int64_t from) = {
    [FLOATS] = {multiply_one_FLOATS, multiply_alike_FLOATS},
    WITH_PAIRS([PAIRS] = {multiply_one_PAIRS, multiply_alike_PAIRS})
};
#endif

#ifdef __AVX512BF16__
/* Of sixteen rows from one on the values of a pair of inputs, rounded, side by side. */
INLINE __m512i side_by_side(float (*values)[WIDE], int64_t pair, int64_t row) {
    return beside_each_other(_mm512_loadu_ps(values[2 * pair] + row), _mm512_loadu_ps(values[2 * pair + 1] + row));
}

/* The same in pairs. */
static void multiply_tile_in_pairs(const Product *all, const Group *groups, int64_t first, int64_t wide, int64_t from,
                                   int64_t some) {
    float lanes[GIVEN][LANES][WIDE], values[LANES][WIDE] = {{0}};
    memset(lanes, 0, (size_t)some * sizeof *lanes);
    for (int64_t input = 0; input < all->columns; input += LANES) {
        values_of_columns(all->work, groups, input, first, wide, values);
        int64_t half = input / LANES % 2 * (LANES / 2);
        for (int pair = 0; pair < LANES / 2; pair++)
            for (int row = 0; row < WIDE; row += 16) {
                __m512i both = side_by_side(values, pair, row);
                for (int64_t at = 0; at < some; at++) {
                    int32_t these;
                    memcpy(&these, given_at(PAIRS, all->given, (from + at) * all->columns + input + 2 * pair), sizeof these);
                    float *own = lanes[at][half + pair] + row;
                    _mm512_storeu_ps(own, with_pairs(_mm512_loadu_ps(own), both, _mm512_set1_epi32(these)));
                }
            }
    }
    for (int64_t at = 0; at < some; at++) keep_wide(all, first, wide, from + at, lanes[at]);
}
#else
#define multiply_tile_in_pairs multiply_tile
#endif

/* LANES values of a row, from an input on, laid out beside those of others. */
INLINE void lay_values(int way, Lanes values, int64_t steps, int64_t row, int64_t input, char *made) {
    char line[STEP] = {0};
    add_values(way | KEPT, 0, values, line);
    lay_out(BESIDE, steps, line, LANES * bytes_of(way), laid_at(made, BESIDE, steps, row, input * bytes_of(way)));
}

/* Unpack wide rows from first on and lay them out, for many rows given. */
static void unpack_columns(const Product *all, const Group *groups, int64_t first, int64_t wide, char *made) {
    float values[LANES][WIDE];
    int way = (int)all->way;
    int64_t steps = steps_of(way, all->columns);
    for (int64_t input = 0; input < all->columns; input += LANES) {
        values_of_columns(all->work, groups, input, first, wide, values);
        for (int64_t row = 0; row < wide; row += PART) {
            LoosePart lines[PART], columns[PARTS][PART];
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                for (int at = 0; at < PART; at++) lines[at] = *(const LoosePart *)(values[part * PART + at] + row);
                transpose(lines, columns[part]);
            }
            for (int64_t at = 0; at < PART && row + at < wide; at++) {
                float own[LANES];
                for (int part = 0; part < PARTS; part++) *(LoosePart *)(own + part * PART) = columns[part][at];
                lay_values(way, values_at(own), steps, row + at, input, made);
            }
        }
    }
}

static void multiply_in_columns(const Product *all, int64_t begin, int64_t end, char *room) {
    Group *groups = (Group *)room;
    char *behind = room + all->work->across * (int64_t)sizeof *groups;
    for (int64_t first = begin; first < end; first += WIDE) {
        int64_t wide = end - first < WIDE ? end - first : WIDE;
        unpack_groups(all->work, first, wide, groups);
        if (all->laid) {
            char *sums = clear_last(all, wide, behind);
            unpack_columns(all, groups, first, wide, behind);
            multiply_unpacked(all, first, first + wide, behind, (float *)sums);
        }
        else
            for (int64_t from = 0; from < all->count; from += GIVEN) {
                int64_t some = all->count - from < GIVEN ? all->count - from : GIVEN;
#ifdef __AVX2__
                if (some == 1 && wide == WIDE) {
                    int alike = !all->work->table && all->work->block_columns % LANES == 0;
                    MULTIPLY_ONE_OF[all->way][alike](all, groups, first, from);
                    continue;
                }
#endif
                if (in_pairs(all->way))
                    multiply_tile_in_pairs(all, groups, first, wide, from, some);
                else
                    multiply_tile(all, groups, first, wide, from, some);
            }
    }
}

#if HAS_TILES
/* Weights that rest in columns, in tiles: what is given is on the left as it lies, and values of two inputs of a row lie side
   by side as they are unpacked. Of 64 rows all is unpacked, to serve all that is given. */
static void unpack_to_tiles(const Product *all, const Group *groups, int64_t first, int64_t wide, int64_t input, char *made) {
    float values[LANES][WIDE] = {{0}};
    values_of_columns(all->work, groups, input, first, wide, values);
    for (int64_t pair = 0; pair < LANES / 2; pair++)
        for (int64_t row = 0; row < WIDE; row += TILE)
            _mm512_storeu_si512(made + row / TILE * TILE_BYTES + pair * LINE, side_by_side(values, pair, row));
}

static void multiply_columns_in_tiles(const Product *all, int64_t begin, int64_t end, char *room) {
    Group *groups = (Group *)room;
    char *values = room + all->work->across * (int64_t)sizeof *groups;
    int64_t line = 2 * all->columns, tiles = WIDE / TILE * TILE_BYTES;
    Sums sums[STRIPS] __attribute__((aligned(LINE)));
    for (int64_t first = begin; first < end; first += WIDE) {
        int64_t wide = end - first < WIDE ? end - first : WIDE, few = all->count <= TILE;
        unpack_groups(all->work, first, wide, groups);
        if (!few)
            for (int64_t input = 0; input < all->columns; input += LANES)
                unpack_to_tiles(all, groups, first, wide, input, values + input / LANES * tiles);
        for (int64_t given = 0, some; given < all->count; given += some) {
            some = all->count - given < TILE ? all->count - given : TILE;
            Side left = {(const char *)all->given + given * line, line, LINE, 0}, right = {values, LINE, tiles, TILE_BYTES};
            shape_tiles(some, TILE);
            clear_sums();
            for (int64_t input = 0; few && input < all->columns; input += LANES, left.at += LINE) {
                unpack_to_tiles(all, groups, first, wide, input, values);
                add_across(left, right, 1);
            }
            if (!few) add_across(left, right, all->columns / LANES);
            store_sums(sums, TILE);
            for (int64_t tile = 0; tile * TILE < wide; tile++)
                for (int64_t at = 0; at < some; at++) {
                    int64_t row = first + tile * TILE, most = wide - tile * TILE;
                    keep_line(all, given + at, row, most < TILE ? most : TILE, sums[tile][at]);
                }
        }
    }
}

static void multiply_in_tiles(const Product *all, int64_t begin, int64_t end, char *room) {
    if (all->family == GROUPED)
        multiply_columns_in_tiles(all, begin, end, room);
    else
        multiply_rows_in_tiles(all, begin, end, room);
}
#else
static void multiply_in_tiles(const Product *all, int64_t begin, int64_t end, char *room) {
    (void)all, (void)begin, (void)end, (void)room;
}
#endif

static void take_rows(void *given) {
    Product *all = given;
    int64_t number = __atomic_fetch_add(&all->next_room, 1, __ATOMIC_RELAXED), begin;
    char *room = (char *)(all->rooms + number * all->room);
    Tiles before = begin_tiles(all);
    while ((begin = __atomic_fetch_add(&all->next_row, all->step, __ATOMIC_RELAXED)) < all->rows) {
        int64_t end = begin + all->step < all->rows ? begin + all->step : all->rows;
        if (all->way == TILES)
            multiply_in_tiles(all, begin, end, room);
        else if (all->family == GROUPED)
            multiply_in_columns(all, begin, end, room);
        else
            multiply_in_rows(all, begin, end, room);
    }
    end_tiles(all, &before);
}

/* What is given, in threads which take some rows of it at a time; the last of these make up for missing ones. */
static void lay_given_out(void *given) {
    Product *all = given;
    int64_t line = all->columns * bytes_of(all->way), steps = steps_of(all->way, all->columns);
    int64_t some = all->way == TILES ? TILE : AT_ONCE, first;
    while ((first = __atomic_fetch_add(&all->next_row, some, __ATOMIC_RELAXED)) < all->count)
        if (all->way == TILES)
            lay_pairs_out(all, first, first + some < all->count ? some : all->count - first);
        else
            for (int64_t at = first; at < first + some; at++) {
                int64_t own = at < all->count ? at : all->count - 1;
                const char *from = given_at(all->way, all->given, own * all->columns);
                lay_out(AT_ONCE, steps, from, line, laid_at(all->laid, AT_ONCE, steps, at, 0));
            }
}

typedef void Team(void (*part)(void *), void *all, unsigned threads, unsigned flags);

static void in_team(Product *all, int64_t threads, Team *team, void (*part)(void *)) {
    if (team && threads > 1)
        team(part, all, (unsigned)threads, 0);
    else
        part(all);
}

/* Multiply in so many threads of a team, which is OpenMP's; null: in this one alone. */
void multiply_packed(Product *all, int64_t threads, Team *team) {
    if (all->family == SCALED && all->work->kind == FP4) all->values = OF_FP4;
    if (all->family == SCALED && all->work->kind == INT4) all->values = OF_INT4;
    if (all->laid)
        in_team(all, threads, team, lay_given_out), all->next_row = 0;
    else if (all->way == TILES)
        all->laid = (void *)all->given;
    in_team(all, threads, team, take_rows);
}

/* What is read of an open file, from offset on, to a place in a buffer: so many bytes, or fewer if they are the least
   that is wanted. */
typedef struct {
    int64_t file, offset, bytes, least, place;
} Read;

/* Do the reads into the buffer, then call the loop, whose codes, scales and what is above are places in the buffer and
   what is made one in the target. Returns 0, or -1 where something couldn't be read. */
int32_t read_and_unpack(const Read *reads, int64_t count, char *buffer, void (*loop)(const Work *), const Work *relative,
                        char *target) {
    for (int64_t number = 0; number < count; number++) {
        const Read *read = reads + number;
        for (int64_t done = 0; done < read->least;) {
            char *to = buffer + read->place + done;
            ssize_t got = pread((int)read->file, to, (size_t)(read->bytes - done), read->offset + done);
            if (got <= 0) return -1;
            done += got;
        }
    }
    Work all = *relative;
    all.codes = (uint8_t *)buffer + (intptr_t)all.codes;
    all.scales = (uint8_t *)buffer + (intptr_t)all.scales;
    if (all.above) all.above = (uint8_t *)buffer + (intptr_t)all.above;
    all.made = target + (intptr_t)all.made;
    loop(&all);
    return 0;
}
