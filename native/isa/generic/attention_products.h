// How attention multiplies with K and V of bfloat16, at levels that do so vector by vector. A level that does otherwise
// has an attention_products.h in its own folder.
#pragma once

#include "kernels/attention_elements.h"

namespace tidewheel::TW_ISA {

using BFloat16Products = ElementProducts<bf16>;

}  // namespace tidewheel::TW_ISA
