#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <random>
#include <vector>

namespace weft {

// A choice per factor: cell[f] in [0, sizes[f]).
using Cell = std::vector<int>;

// All cells for which `valid` holds, in lexicographic order.
inline std::vector<Cell> FullProduct(const std::vector<int>& sizes,
                                     const std::function<bool(const Cell&)>& valid) {
  std::vector<Cell> cells;
  Cell cell(sizes.size(), 0);
  for (;;) {
    if (valid(cell)) cells.push_back(cell);
    std::size_t f = sizes.size();
    while (f > 0 && ++cell[f - 1] == sizes[f - 1]) cell[--f] = 0;
    if (f == 0) return cells;
  }
}

// Few of `cells` such that every pair of choices that occurs in any cell occurs in one of these.
inline std::vector<Cell> PairwiseCover(const std::vector<Cell>& cells) {
  if (cells.empty()) return {};
  const std::size_t factors = cells[0].size();
  std::vector<int> sizes(factors, 0);
  for (const Cell& cell : cells) {
    for (std::size_t f = 0; f < factors; ++f) sizes[f] = std::max(sizes[f], cell[f] + 1);
  }
  // Each pair of choices has a number.
  const auto for_each_pair = [&](const Cell& cell, const auto& visit) {
    std::size_t first = 0;
    for (std::size_t a = 0; a < factors; ++a) {
      for (std::size_t b = a + 1; b < factors; ++b) {
        visit(first + static_cast<std::size_t>(cell[a]) * sizes[b] + cell[b]);
        first += static_cast<std::size_t>(sizes[a]) * sizes[b];
      }
    }
  };
  std::size_t num_pairs = 0;
  for_each_pair(Cell(factors, 0), [&](std::size_t pair) { num_pairs = pair; });
  num_pairs += static_cast<std::size_t>(sizes[factors - 2]) * sizes[factors - 1];
  std::vector<char> uncovered(num_pairs, 0);
  for (const Cell& cell : cells) {
    for_each_pair(cell, [&](std::size_t pair) { uncovered[pair] = 1; });
  }
  std::size_t left = std::count(uncovered.begin(), uncovered.end(), 1);
  std::vector<Cell> cover;
  while (left > 0) {
    const Cell* best = nullptr;
    std::size_t best_new = 0;
    for (const Cell& cell : cells) {
      std::size_t fresh = 0;
      for_each_pair(cell, [&](std::size_t pair) { fresh += uncovered[pair]; });
      if (fresh > best_new) {
        best_new = fresh;
        best = &cell;
      }
    }
    for_each_pair(*best, [&](std::size_t pair) { uncovered[pair] = 0; });
    left -= best_new;
    cover.push_back(*best);
  }
  return cover;
}

// `count` of `cells`, drawn with `seed`.
inline std::vector<Cell> DrawCells(const std::vector<Cell>& cells, int count, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<Cell> drawn;
  for (int i = 0; i < count; ++i) drawn.push_back(cells[rng() % cells.size()]);
  return drawn;
}

}  // namespace weft
