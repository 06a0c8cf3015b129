// What each ISA level must offer to the kernels of native/kernels. kernels/table.cpp includes this file, so each level
// is checked once. The compiler's error names the operation that is missing or has other types. isa/scalar/simd.h says
// what each operation of simd.h computes. A level without its own packing.h, micro_kernels.h or attention_products.h
// uses those of isa/generic, which say what their names mean.
#pragma once

#include <concepts>

#include "attention_products.h"
#include "micro_kernels.h"
#include "packing.h"
#include "simd.h"

namespace tidewheel::TW_ISA {

// simd.h: vectors of kLanes floats.
template <typename F>
concept FloatVector = requires(F a, float x, float* to, const float* from, uint32_t bits) {
  { set1(x) } -> std::same_as<F>;
  { zero() } -> std::same_as<F>;
  { add(a, a) } -> std::same_as<F>;
  { sub(a, a) } -> std::same_as<F>;
  { mul(a, a) } -> std::same_as<F>;
  { div(a, a) } -> std::same_as<F>;
  { fma(a, a, a) } -> std::same_as<F>;
  { dot_single(a, a, from) } -> std::same_as<F>;
  { abs(a) } -> std::same_as<F>;
  { max(a, a) } -> std::same_as<F>;
  { min(a, a) } -> std::same_as<F>;
  { round(a) } -> std::same_as<F>;
  { pow2(a) } -> std::same_as<F>;
  { binade(a) } -> std::same_as<F>;
  { select_less(a, a, a, a) } -> std::same_as<F>;
  { keep_if(a, a, a) } -> std::same_as<F>;
  { choose(bits, a, a) } -> std::same_as<F>;
  { unordered(a, a) } -> std::same_as<uint32_t>;
  { compress(to, a, a, a) } -> std::same_as<int>;
  { hsum(a) } -> std::same_as<float>;
  { hmax(a) } -> std::same_as<float>;
};

template <typename F, typename T>
concept LoadedFrom = requires(const T* from) {
  { load(from) } -> std::same_as<F>;
};

template <typename V, typename T>
concept StoredAs = requires(V a, T* to) {
  { store(to, a) } -> std::same_as<void>;
};

// simd.h: pairs of bfloat16, or of numbers that bfloat16 holds exactly.
template <typename Pairs, typename F>
concept PairVector = requires(Pairs pairs, F sum, const BF16Activation* x, const e4m3* from, bf16* to) {
  { drop_odd(pairs) } -> std::same_as<Pairs>;
  { dot_pairs(sum, pairs, x) } -> std::same_as<F>;
  { widen(from, to) } -> std::same_as<void>;
};

template <typename Pairs, typename T>
concept PairsLoadedFrom = requires(const T* from) {
  { load_pairs(from) } -> std::same_as<Pairs>;
};

// simd.h: vectors of kLanes integers.
template <typename I, typename F>
concept IntVector = requires(I a, F floats, int x, const float* table) {
  { set1_int(x) } -> std::same_as<I>;
  { add(a, a) } -> std::same_as<I>;
  { hsum(a) } -> std::same_as<int>;
  { to_floats(a) } -> std::same_as<F>;
  { small_to_floats(a) } -> std::same_as<F>;
  { round_to_int(floats) } -> std::same_as<I>;
  { lookup<0>(table, a) } -> std::same_as<F>;
};

// simd.h: four bytes for each of kLanes columns, as codes of a few bits each.
template <typename Bytes, typename Quads>
concept ByteVector = requires(Bytes a, const uint8_t* from, uint8_t x) {
  { load_bytes(from) } -> std::same_as<Bytes>;
  { field<0, 4>(a) } -> std::same_as<Bytes>;
  { or_above<4>(a, a) } -> std::same_as<Bytes>;
  { sub(a, x) } -> std::same_as<Bytes>;
  { lookup(from, a) } -> std::same_as<Bytes>;
  { as_quads(a) } -> std::same_as<Quads>;
};

// simd.h: the same bytes, as factors of dot products.
template <typename Quads, typename I, typename NibbleSum>
concept QuadVector = requires(Quads w, I sum, NibbleSum nibbles, const uint8_t* from, const int8_t* x) {
  { load_quads(from) } -> std::same_as<Quads>;
  { dot_quads(sum, w, x) } -> std::same_as<I>;
  { load_nibbles(from, w, w) } -> std::same_as<void>;
  { begin_nibbles(sum) } -> std::same_as<NibbleSum>;
  { dot_quads(nibbles, w, x) } -> std::same_as<NibbleSum>;
  { end_nibbles(sum, nibbles) } -> std::same_as<I>;
};

template <typename NibbleFloats, typename F>
concept NibblesAsFloats = requires(NibbleFloats both, const uint8_t* from) {
  { load_signed_nibbles(from) } -> std::same_as<NibbleFloats>;
  { both.low } -> std::same_as<F&>;
  { both.high } -> std::same_as<F&>;
};

template <typename T>
concept Prefetched = requires(const T* p) {
  { prefetch(p) } -> std::same_as<void>;
  { prefetch_later(p) } -> std::same_as<void>;
};

static_assert(FloatVector<F>);
static_assert(LoadedFrom<F, float> && LoadedFrom<F, bf16> && LoadedFrom<F, f16> && LoadedFrom<F, e4m3>);
static_assert(LoadedFrom<F, uint8_t> && LoadedFrom<F, int8_t> && LoadedFrom<I, uint32_t>);
static_assert(StoredAs<F, float> && StoredAs<F, bf16> && StoredAs<F, f16>);
static_assert(StoredAs<I, int8_t> && StoredAs<Bytes, uint8_t>);
static_assert(PairVector<Pairs, F>);
static_assert(PairsLoadedFrom<Pairs, bf16> && PairsLoadedFrom<Pairs, e5m2> && PairsLoadedFrom<Pairs, e4m3>);
static_assert(PairsLoadedFrom<Pairs, int8_t>);
static_assert(IntVector<I, F>);
static_assert(ByteVector<Bytes, Quads>);
static_assert(QuadVector<Quads, I, NibbleSum>);
static_assert(NibblesAsFloats<NibbleFloats, F>);
static_assert(Prefetched<void>);
static_assert(kPanel % kLanes == 0 && kBlockTokens % kLanes == 0, "panels and blocks are whole vectors");
static_assert(kTileRows > 0 && kTileVectors > 0 && kTileVectors <= kStrips, "a tile is rows by vectors of a panel");
static_assert(kQuadZero == 0 || kQuadZero == 128, "bytes are multiplied as they are, or plus 128");

// Optional parts of simd.h. Levels without them use the operations above instead.

// With kDotsBytes: dot products of unsigned and signed bytes, for attention with an int8 cache.
template <typename I, typename Quads>
concept ByteDots = requires(I sum, Quads w, const uint8_t* x, uint8_t* to) {
  { dot_quads(sum, x, w) } -> std::same_as<I>;
  { settled(sum) } -> std::same_as<I>;
  { store(to, sum) } -> std::same_as<void>;
};

// With multiply_short: sums of products in 16 bits.
template <typename I, typename Quads>
concept ShortSums = requires(I sum, Quads w, const int8_t* x) {
  { add(multiply_short(w, x), multiply_short(w, x)) } -> std::same_as<decltype(multiply_short(w, x))>;
  { add_short(sum, multiply_short(w, x)) } -> std::same_as<I>;
};

// With load_half: loads the two halves of pairs one after the other, for levels with too few registers for both.
template <typename F, typename T>
concept HalvesLoadedFrom = requires(const T* from) {
  { load_half<false>(from) } -> std::same_as<F>;
  { load_half<true>(from) } -> std::same_as<F>;
};

// Four more optional operations: dot_rows<ROWS>(sums, quads, x) computes the dot products of several rows at once.
// accumulate_rows(dot, body) calls body(sums) with sums of the level's own kind, which dot_rows takes, and adds them to
// dot. prefetch_in_steps(line) replaces the usual prefetch ahead of a panel's line. pair_quads(first, second) puts two vectors
// of quads in the order that expanded chunks have for the level's own multiply_expanded.

template <typename F, typename I, typename Quads, typename T>
constexpr bool has_whole_options() {
  if constexpr (kDotsBytes) static_assert(ByteDots<I, Quads>);
  if constexpr (kHasShortSums<Quads>) static_assert(ShortSums<I, Quads>);
  if constexpr (kLoadsHalves<T>) static_assert(HalvesLoadedFrom<F, T>);
  return true;
}
static_assert(has_whole_options<F, I, Quads, bf16>());

// packing.h.
template <typename T>
constexpr bool kFloatsArePacked =
    kFloatUnit<T> % Element<T>::kStep == 0 && kFloatRun<T> % kFloatUnit<T> == 0 && kRowGroup % kFloatRun<T> == 0;
static_assert(kFloatsArePacked<float> && kFloatsArePacked<bf16> && kFloatsArePacked<f16>, "runs are whole units");
static_assert(kGroupRun % kIntegerUnit == 0 && kChannelRun % kIntegerUnit == 0, "runs are whole units");
static_assert(kBlockRun % kQuad == 0, "runs of blocks are whole quads");
static_assert(kRowGroup % kGroupRun == 0 && kRowGroup % kBlockRun == 0, "groups are whole runs");
static_assert(std::same_as<decltype(kExpandedForTiles), const bool>, "kExpandedForTiles is a bool");
static_assert(kFewRows > 0 && kRowBlockBytes > 0 && packed_rows(WeightKind::kInt8) > 0, "there is at least one row");
static_assert(kInt8Flip == 0 || kInt8Flip == 0x80, "bytes are stored plus 128, or as they are");

// micro_kernels.h. A kernel may also have bring(data, bytes), which prefetches a part of the next panel. A level that
// multiplies what quantized files' chunks expand to in its own way has multiply_expanded<TRAITS, ROWS>: see gemm_blocks.h.
template <typename Kernel>
concept MicroKernel = requires(Kernel kernel, const WeightFormat& format, const char* packed, int count, float* tile) {
  Kernel();
  { Kernel::kRows } -> std::same_as<const int&>;
  { kernel.multiply(format, packed, packed, count, count, tile) } -> std::same_as<void>;
};

// A kernel whose peak rate `tidewheel bench` measures.
template <typename Kernel>
concept MeasuredKernel = requires(int rounds) {
  { Kernel::peak(rounds) } -> std::same_as<double>;
};

static_assert(MicroKernel<FloatRows<float>> && MicroKernel<FloatRows<bf16>> && MicroKernel<FloatRows<f16>>);
static_assert(MicroKernel<GroupRows<false, false>> && MicroKernel<GroupRows<true, false>>);
static_assert(MicroKernel<GroupRows<true, true>> && MicroKernel<Int8ChannelRows>);
static_assert(MicroKernel<ExpandedRows<ChunkTraits::of(kQ4KTraits)>>);
static_assert(MeasuredKernel<FloatRows<float>> && MeasuredKernel<FloatRows<bf16>> && MeasuredKernel<Int8ChannelRows>);

// attention_products.h: see Products in kernels/attention_parts.h.
template <typename P>
concept AttentionProducts = requires(P products, const AttentionArgs& args, const Rows& rows, Scratch& scratch,
                                     const Partial& result, int i, F x) {
  P(args, rows, scratch);
  { P::kRows } -> std::same_as<const int&>;
  { P::kAdjusts } -> std::same_as<const bool&>;
  { P::kSpreads } -> std::same_as<const bool&>;
  { P::rows_at_once(i) } -> std::same_as<int>;
  { products.begin_split(result) } -> std::same_as<void>;
  { products.begin_tile(i, i) } -> std::same_as<void>;
  { products.adjusted(x, i, i) } -> std::same_as<F>;
  products.begin_row(i, i);
  { products.end_weights(i, i, i) } -> std::same_as<void>;
};

// Products with score_blocks take any number of rows at once.
template <typename P>
concept BlockProducts = requires(P products, int i) {
  { products.score_blocks(i, i, i) } -> std::same_as<void>;
  { products.sum_rows(i, i, i) } -> std::same_as<void>;
};

// Other products take a number of rows that the compiler knows.
template <typename P>
concept VectorProducts = requires(P products, int i) {
  { products.template score_vectors<1, 1>(i, i) } -> std::same_as<void>;
  { products.template sum_rows<1>(i, i) } -> std::same_as<void>;
};

template <typename P>
constexpr bool multiplies_rows() {
  if constexpr (requires(P products) { products.score_blocks(1, 0, 1); }) {
    static_assert(BlockProducts<P>);
  } else {
    static_assert(VectorProducts<P>);
  }
  return true;
}

static_assert(AttentionProducts<BFloat16Products> && multiplies_rows<BFloat16Products>());
static_assert(AttentionProducts<Int8Products> && multiplies_rows<Int8Products>());

}  // namespace tidewheel::TW_ISA
