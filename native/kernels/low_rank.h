// Adds adapters' updates to a tile of products. An update depends only on the product's own row and column.
#pragma once

#include "kernels/element.h"
#include "kernels/kernels.h"
#include "simd.h"

namespace tidewheel::TW_ISA {

// The vectors of a LoRA panel's outputs, and the rows that share what is loaded from it. All their sums have to be in
// registers.
constexpr int kLoraPanelVectors = kLoraPanel / kLanes;
constexpr int kLoraPanelRows = kLoraPanelVectors == 1 ? 4 : 2;

// Multiplies some rows by a LoRA panel.
template <typename T, int ROWS>
TW_INLINE void multiply_lora_panel(const T* w, int inputs, const typename Element<T>::Activation* const* x,
                               F (&products)[ROWS][kLoraPanelVectors]) {
  using E = Element<T>;
  constexpr int kTogether = 2 * E::kStep;
  static_assert(kLoraPanelInputs % kTogether == 0);
  // Even and odd steps have separate sums, because one chain of additions would be latency-bound.
  F sums[2][ROWS][kLoraPanelVectors];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kLoraPanelVectors; ++v) sums[0][r][v] = sums[1][r][v] = zero();
  }
  for (int i = 0; i < inputs; i += kTogether, w += kTogether * kLoraPanel) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      typename E::Vector weights[kLoraPanelVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kLoraPanelVectors; ++v) weights[v] = E::load_step(w + (odd * kLoraPanel + v * kLanes) * E::kStep);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kLoraPanelVectors; ++v) sums[odd][r][v] = E::dot(sums[odd][r][v], weights[v], x[r] + i + odd * E::kStep);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kLoraPanelVectors; ++v) products[r][v] = add(sums[0][r][v], sums[1][r][v]);
  }
}

// Calls `body` for `rows` rows, at most `kLoraPanelRows`.
template <typename Body>
TW_INLINE void with_rows(int rows, Body&& body) {
  switch (rows) {
    case 1: return body.template operator()<1>();
    case 2: return body.template operator()<2>();
    case 3:
      if constexpr (kLoraPanelRows > 2) return body.template operator()<3>();
      break;
    default:
      if constexpr (kLoraPanelRows > 3) return body.template operator()<4>();
      break;
  }
}

// Adds B h to some rows of a tile. The rows have the same adapter.
template <typename T, int ROWS>
TW_INLINE void add_panel(const LowRankRow* rows, const LoraPanel* lora_panels, float* tile) {
  using Activation = typename Element<T>::Activation;
  for (int s = 0; s < kPanel / kLoraPanel; ++s, ++lora_panels, tile += kLoraPanel) {
    const Activation* h[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) h[r] = static_cast<const Activation*>(rows[r].h) + lora_panels->first;
    F products[ROWS][kLoraPanelVectors];
    multiply_lora_panel<T, ROWS>(static_cast<const T*>(lora_panels->b), lora_panels->count, h, products);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kLoraPanelVectors; ++v) {
        float* const y = tile + r * kPanel + v * kLanes;
        store(y, add(load(y), products[r][v]));
      }
    }
  }
}

// `tile` [count, kPanel] holds the products of rows with the panel. Rows of one adapter are mostly side by side.
TW_INLINE void add_low_rank(const LowRankRow* rows, int count, int panel, float* tile) {
  for (int begin = 0, end; begin < count; begin = end) {
    const LowRankRow& row = rows[begin];
    end = begin + 1;
    if (!row.lora_panels) continue;
    while (end < count && end < begin + kLoraPanelRows && rows[end].lora_panels == row.lora_panels) ++end;
    const LoraPanel* const lora_panels = row.lora_panels + panel * (kPanel / kLoraPanel);
    with_rows(end - begin, [&]<int ROWS>() {
      float* const y = tile + begin * kPanel;
      switch (row.type) {
        case DType::kFloat32: return add_panel<float, ROWS>(&row, lora_panels, y);
        case DType::kBFloat16: return add_panel<bf16, ROWS>(&row, lora_panels, y);
        case DType::kFloat16: return add_panel<f16, ROWS>(&row, lora_panels, y);
      }
    });
  }
}

// Prefetches the entries that say where a panel's LoRA panels are.
TW_INLINE void prefetch_lora_panels(const LowRankRow* rows, int count, int panel) {
  for (int r = 0; r < count; ++r) {
    if (rows[r].lora_panels) prefetch(rows[r].lora_panels + panel * (kPanel / kLoraPanel));
  }
}

// While a tile is computed, prefetches the LoRA panels to be added to it, the entries that say where the next panel's
// LoRA panels are, and a part of the matrix that is read next. Much other memory is read between two panels.
TW_INLINE void prefetch_low_rank(const LowRankRow* rows, int count, int panel) {
  constexpr int kLoraPanels = kPanel / kLoraPanel;
  const LoraPanel* last = nullptr;
  for (int r = 0; r < count; ++r) {
    if (!rows[r].lora_panels || rows[r].lora_panels == last) continue;
    last = rows[r].lora_panels;
    const LoraPanel* const lora_panels = last + panel * kLoraPanels;
    prefetch(lora_panels + kLoraPanels);
    for (int s = 0; s < kLoraPanels; ++s) {
      const char* const b = static_cast<const char*>(lora_panels[s].b);
      for (size_t i = 0; i < lora_panels[s].bytes(rows[r].type); i += 64) prefetch(b + i);
    }
    const char* const next = rows[r].next + panel * rows[r].next_bytes;
    for (size_t i = 0; i < rows[r].next_bytes; i += 64) prefetch_later(next + i);
  }
}

}  // namespace tidewheel::TW_ISA
