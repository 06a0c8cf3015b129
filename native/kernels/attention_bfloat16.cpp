// Attention with bfloat16 K and V.
#include "attention_products.h"
#include "kernels/attention_split.h"

namespace tidewheel::TW_ISA {

template <>
struct ProductsOf<bf16> {
  using Type = BFloat16Products;
};

template void attention<bf16, Cached<bf16>::Query, Cached<bf16>::kStep, kTileRows>(const AttentionArgs&);
template void attention_split<bf16, Cached<bf16>::Query, Cached<bf16>::kStep, kTileRows>(const AttentionArgs&, int, float*);

}  // namespace tidewheel::TW_ISA
