// Attention with K and V as 8-bit floats.
#include "kernels/attention_elements.h"
#include "kernels/attention_split.h"

namespace tidewheel::TW_ISA {

template <>
struct ProductsOf<e5m2> {
  using Type = ElementProducts<e5m2>;
};
template <>
struct ProductsOf<e4m3> {
  using Type = ElementProducts<e4m3>;
};

template void attention<e5m2, Cached<e5m2>::Query, Cached<e5m2>::kStep, kTileRows>(const AttentionArgs&);
template void attention_split<e5m2, Cached<e5m2>::Query, Cached<e5m2>::kStep, kTileRows>(const AttentionArgs&, int, float*);
template void attention<e4m3, Cached<e4m3>::Query, Cached<e4m3>::kStep, kTileRows>(const AttentionArgs&);
template void attention_split<e4m3, Cached<e4m3>::Query, Cached<e4m3>::kStep, kTileRows>(const AttentionArgs&, int, float*);

}  // namespace tidewheel::TW_ISA
