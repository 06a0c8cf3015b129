// How attention multiplies with bfloat16 K and V on levels that do so vector by vector. Other levels have an
// attention_products.h in their own folder.
#pragma once

#include "kernels/attention_elements.h"

namespace tidewheel::TW_ISA {

using BFloat16Products = ElementProducts<bf16>;

}  // namespace tidewheel::TW_ISA
