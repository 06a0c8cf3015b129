// Attention with int4 K and V.
#include "kernels/attention_nibbles.h"
#include "kernels/attention_split.h"

namespace tidewheel::TW_ISA {

template <>
struct ProductsOf<int4x2> {
  using Type = NibbleProducts;
};

template void attention<int4x2, Cached<int4x2>::Query, Cached<int4x2>::kStep, kTileRows>(const AttentionArgs&);
template void attention_split<int4x2, Cached<int4x2>::Query, Cached<int4x2>::kStep, kTileRows>(const AttentionArgs&, int, float*);

}  // namespace tidewheel::TW_ISA
