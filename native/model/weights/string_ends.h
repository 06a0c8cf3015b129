// The strings of a GGUF file's array, which lie one after another, each behind its length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tidewheel {

// How far behind `begin` each of `ends.size()` strings ends. A length has 8 bytes, the lowest first. Returns false if
// they do not all end within the content.
inline bool string_ends(std::span<const uint8_t> content, size_t begin, std::span<uint64_t> ends) {
  if (begin > content.size()) return false;
  size_t at = begin;
  for (uint64_t& end : ends) {
    if (content.size() - at < 8) return false;
    uint64_t length = 0;
    for (int byte = 0; byte < 8; ++byte) length |= uint64_t{content[at + byte]} << (8 * byte);
    at += 8;
    if (length > content.size() - at) return false;
    at += length;
    end = at - begin;
  }
  return true;
}

}  // namespace tidewheel
