// Unit tests without a framework: TEST(name) { CHECK(…); } in any file, one `run_tests()` in main.
#pragma once
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace mirage::tests {

struct Registry {
  std::vector<std::pair<std::string, void (*)()>> tests;
  int checks = 0, failures = 0;
};

inline Registry& registry() {
  static Registry all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { registry().tests.emplace_back(name, run); }
};

inline void check(bool holds, const char* text, const char* file, int line) {
  ++registry().checks;
  if (holds) return;
  ++registry().failures;
  std::cerr << file << ":" << line << ": " << text << "\n";
}

inline int run_tests() {
  for (auto& [name, run] : registry().tests) {
    try {
      run();
    } catch (const std::exception& e) {
      check(false, e.what(), name.c_str(), 0);
    }
  }
  std::cout << registry().tests.size() << " tests, " << registry().checks << " checks, "
            << registry().failures << " failed\n";
  return registry().failures == 0 ? 0 : 1;
}

}  // namespace mirage::tests

#define TEST(name)                                                   \
  static void name();                                                \
  static const mirage::tests::Register register_##name{#name, name}; \
  static void name()
#define CHECK(...) \
  mirage::tests::check(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
