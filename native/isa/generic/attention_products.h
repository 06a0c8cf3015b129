// How attention multiplies with K and V of bfloat16 and int8 on levels that do so vector by vector. Other levels have an
// attention_products.h in their own folder.
#pragma once

#include "kernels/attention_bytes.h"
#include "kernels/attention_elements.h"

namespace tidewheel::TW_ISA {

using BFloat16Products = ElementProducts<bf16>;
using Int8Products = Int8VectorProducts;

}  // namespace tidewheel::TW_ISA
