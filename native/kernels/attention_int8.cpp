// Attention with int8 K and V.
#include "attention_products.h"
#include "kernels/attention_split.h"

namespace tidewheel::TW_ISA {

template <>
struct ProductsOf<int8_t> {
  using Type = Int8Products;
};

template void attention<int8_t, Cached<int8_t>::Query, Cached<int8_t>::kStep, kTileRows>(const AttentionArgs&);
template void attention_split<int8_t, Cached<int8_t>::Query, Cached<int8_t>::kStep, kTileRows>(const AttentionArgs&, int, float*);

}  // namespace tidewheel::TW_ISA
