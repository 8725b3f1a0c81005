#pragma once

#include <cstddef>
#include <functional>
#include <random>
#include <set>
#include <tuple>
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
  using Pair = std::tuple<std::size_t, int, std::size_t, int>;
  const auto pairs_of = [](const Cell& cell) {
    std::vector<Pair> pairs;
    for (std::size_t a = 0; a < cell.size(); ++a) {
      for (std::size_t b = a + 1; b < cell.size(); ++b) pairs.emplace_back(a, cell[a], b, cell[b]);
    }
    return pairs;
  };
  std::set<Pair> uncovered;
  for (const Cell& cell : cells) {
    for (const Pair& pair : pairs_of(cell)) uncovered.insert(pair);
  }
  std::vector<Cell> cover;
  while (!uncovered.empty()) {
    const Cell* best = nullptr;
    std::size_t best_new = 0;
    for (const Cell& cell : cells) {
      std::size_t fresh = 0;
      for (const Pair& pair : pairs_of(cell)) fresh += uncovered.count(pair);
      if (fresh > best_new) {
        best_new = fresh;
        best = &cell;
      }
    }
    for (const Pair& pair : pairs_of(*best)) uncovered.erase(pair);
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
