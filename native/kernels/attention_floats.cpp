// Attention with float32 and float16 K and V, and the reduction of KV splits that were computed apart.
#include "kernels/attention_elements.h"
#include "kernels/attention_split.h"

namespace tidewheel::TW_ISA {

template <>
struct ProductsOf<float> {
  using Type = ElementProducts<float>;
};
template <>
struct ProductsOf<f16> {
  using Type = ElementProducts<f16>;
};

template void attention<float, Cached<float>::Query, Cached<float>::kStep, kTileRows>(const AttentionArgs&);
template void attention_split<float, Cached<float>::Query, Cached<float>::kStep, kTileRows>(const AttentionArgs&, int, float*);
template void attention<f16, Cached<f16>::Query, Cached<f16>::kStep, kTileRows>(const AttentionArgs&);
template void attention_split<f16, Cached<f16>::Query, Cached<f16>::kStep, kTileRows>(const AttentionArgs&, int, float*);

void attention_reduce(const AttentionArgs& args, const float* partials) {
  Scratch scratch(args.scratch);
  const Rows rows(args);
  const size_t size = args.heads.partial_floats(args.num_tokens);
  Fold fold(args, scratch);
  for (int i = 0; i < args.split_end() - args.split_begin(); ++i) {
    const int split = args.split_begin() + i;
    fold.add(args.prefix.has_whole(split) ? rows.in_prefix(split)
                                          : Partial{const_cast<float*>(partials) + i * size, rows.count, rows.values});
  }
  fold.write();
}

}  // namespace tidewheel::TW_ISA
