// Fuzzes the parser of the text form and, behind it, the search: nothing that parses may break it.
//
// With clang this is a libFuzzer target (-fsanitize=fuzzer). Without, MIRAGE_FUZZ_MAIN adds a
// driver that mutates a corpus:
//
//   fuzz_program CORPUS SECONDS [SEED]   for so long; the case under way is in ./fuzz_case.txt
//   fuzz_program FILE                    one case
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "core/program_text.h"
#include "core/search.h"

namespace {

using namespace mirage;

constexpr double kSearchSeconds = 0.05;
constexpr double kPatience = 20;  // seconds until the search counts as deaf to its limit, on a busy
                                  // machine under a sanitizer

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "fuzz: " << what << "\n";
  std::abort();
}

struct Counts {
  long parsed = 0, with_candidates = 0;
  double slowest = 0;
} counts;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  Program program;
  try {
    program = parse(text);
  } catch (const ParseError&) {
    return 0;
  }
  const std::string written = format(program);
  require(format(parse(written)) == written, "a program is not read back as it was written");
  Limits limits;
  limits.seconds = kSearchSeconds;
  limits.max_values = 200;
  limits.max_forms = 20000;
  limits.max_candidates = 4;
  limits.threads = size % 8 == 0 ? 2 : 1;
  limits.clusters = size % 2 == 0;
  const SearchResult result = search(program, limits, nullptr);
  require(!to_string(result.stop).empty(), "a search ended without a reason");
  require(result.stats.seconds < kPatience, "the search does not keep its time limit");
  ++counts.parsed;
  counts.with_candidates += !result.candidates.empty();
  counts.slowest = std::max(counts.slowest, result.stats.seconds);
  return 0;
}

#ifdef MIRAGE_FUZZ_MAIN
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kMaxLines =
    60;  // longer ones cost time and find nothing that shorter ones do not
constexpr std::size_t kPool = 512;

using Words = std::vector<std::string>;
using Lines = std::vector<Words>;

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), "cannot read the corpus");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Lines split(const std::string& text) {
  Lines lines;
  std::istringstream in(text);
  for (std::string line, word; std::getline(in, line);) {
    Words words;
    for (std::istringstream each(line.substr(0, line.find('#'))); each >> word;)
      words.push_back(word);
    if (!words.empty()) lines.push_back(words);
  }
  return lines;
}

std::string join(const Lines& lines) {
  std::string out;
  for (const Words& words : lines) {
    for (const std::string& w : words) out += w + " ";
    out.back() = '\n';
  }
  return out;
}

// Mutations know lines and words, so that many results still parse; a few know bytes only.
class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  std::string operator()(const std::vector<std::string>& pool) {
    Lines lines = split(pick(pool));
    const Lines other = split(pick(pool));
    for (std::size_t n = 1 + below(3); n > 0; --n) change(lines, other);
    if (lines.size() > kMaxLines) lines.resize(kMaxLines);
    std::string text = join(lines);
    if (below(8) == 0)
      for (std::size_t n = 1 + below(3); n > 0; --n) damage(text);
    return text;
  }

  std::size_t below(std::size_t n) {
    return n == 0 ? 0 : random_() % n;
  }  // as std's distributions differ between libraries

 private:
  template <typename T>
  const T& pick(const std::vector<T>& all) {
    return all[below(all.size())];
  }

  void change(Lines& lines, const Lines& other) {
    if (lines.empty() || other.empty()) return;
    const std::size_t at = below(lines.size());
    Words& words = lines[at];
    switch (below(18)) {
      case 0: lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(at)); break;
      case 1: lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(at), pick(other)); break;
      case 2: std::swap(words, lines[below(lines.size())]); break;
      case 3: words[below(words.size())] = pick(pick(lines)); break;
      case 4: words[below(words.size())] = number(); break;
      case 5:
        if (words.size() > 1)
          words.erase(words.begin() + static_cast<std::ptrdiff_t>(below(words.size())));
        break;
      default: grow(lines);  // most often: a further value of those there
    }
  }

  void grow(Lines& lines) {
    Words axes, values;
    for (const Words& w : lines) {
      if (w.size() == 3 && w[0] == "axis") axes.push_back(w[1]);
      if (w.size() > 2 && w[1] == "=") values.push_back(w[0]);
    }
    if (values.empty()) return;
    static const Words binary{"add", "sub", "mul", "div", "mul"}, reduction{"sum", "max", "sum"};
    Words made{"g" + std::to_string(made_++), "="};
    switch (below(6)) {
      case 0: made.insert(made.end(), {"exp", pick(values)}); break;
      case 1:
        made.insert(made.end(),
                    {"opaque", "@" + std::to_string(below(3)), pick(values), pick(values)});
        break;
      case 2:
        if (!axes.empty()) {
          made.insert(made.end(), {pick(reduction), pick(values), pick(axes)});
          break;
        }
        [[fallthrough]];
      default: made.insert(made.end(), {pick(binary), pick(values), pick(values)});
    }
    lines.push_back(made);
    lines.push_back({"output", made[0]});
  }

  std::string number() {
    static const Words all{"0",
                           "1",
                           "-1",
                           "2",
                           "3/2",
                           "64",
                           "4611686018427387904",
                           "4611686018427387905",
                           "9223372036854775807",
                           "-9223372036854775808",
                           "@0",
                           "@2147483647",
                           "1/4611686018427387904",
                           "1/0",
                           "99999999999999999999"};
    return pick(all);
  }

  void damage(std::string& text) {
    if (text.empty()) return;
    const std::size_t at = below(text.size());
    switch (below(3)) {
      case 0: text[at] = static_cast<char>(below(256)); break;
      case 1: text.erase(at, 1 + below(8)); break;
      default: text.insert(at, 1, static_cast<char>(below(256)));
    }
  }

  std::mt19937 random_;
  long made_ = 0;
};

void run(const std::string& text) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  if (argc < 2) {
    std::cerr << "fuzz_program CORPUS SECONDS [SEED], or fuzz_program FILE\n";
    return 2;
  }
  if (argc == 2) {
    run(read(argv[1]));
    std::cout << (counts.parsed ? "parsed\n" : "refused\n");
    return 0;
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1]))
    files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  require(!files.empty(), "the corpus is empty");
  std::vector<std::string> pool;
  for (const auto& file : files) {
    pool.push_back(read(file));
    run(pool.back());
  }
  require(counts.parsed == static_cast<long>(pool.size()),
          "a program of the corpus does not parse");
  Mutator mutate(argc > 3 ? static_cast<unsigned>(std::strtoul(argv[3], nullptr, 10)) : 1);
  const std::size_t seeds = pool.size();
  const auto end = Clock::now() + std::chrono::duration<double>(std::strtod(argv[2], nullptr));
  long cases = 0;
  for (; Clock::now() < end; ++cases) {
    const std::string text = mutate(pool);
    std::ofstream("fuzz_case.txt", std::ios::binary) << text;
    const long before = counts.parsed;
    run(text);
    if (counts.parsed == before) continue;
    if (pool.size() < kPool)
      pool.push_back(text);
    else
      pool[seeds + mutate.below(kPool - seeds)] = text;
  }
  std::cout << "fuzz: " << cases << " cases, " << counts.parsed - static_cast<long>(seeds)
            << " parsed, of all parsed " << counts.with_candidates
            << " with candidates, slowest search " << counts.slowest << " s\n";
}
#endif
