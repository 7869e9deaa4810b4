// The test harness of csrc: one executable a file, `TEST(name) { CHECK(...); }`, and this main.
//
//   ./test_host                 runs all
//   ./test_host a_name ...      runs those
//
// A failed CHECK ends its test. The exit status is 0 only if every test passed and one was run.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "error.h"

namespace check {

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test> tests;

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename Left, typename Right>
void equal(const Left& left, const Right& right, const char* text, const char* file, int line) {
  if (left == right) return;
  std::ostringstream what;
  what << text << ": " << +left << " is not " << +right;
  fail(file, line, what.str());
}

template <typename Run>
void throws(sgl_vmm::ErrorKind kind, Run run, const char* text, const char* file, int line) {
  try {
    run();
  } catch (const sgl_vmm::VmmError& error) {
    if (error.kind == kind) return;
    fail(file, line, std::string(text) + " threw another kind: " + error.what());
  }
  fail(file, line, std::string(text) + " did not throw");
}

}  // namespace check

#define TEST(name)                                                             \
  static void name();                                                          \
  static const bool registered_##name = (check::tests.push_back({#name, &name}), true); \
  static void name()
#define CHECK(...) ((__VA_ARGS__) ? void() : check::fail(__FILE__, __LINE__, #__VA_ARGS__))
#define CHECK_EQ(left, right) check::equal(left, right, #left " == " #right, __FILE__, __LINE__)
#define CHECK_THROWS(kind, ...)                                                             \
  check::throws(sgl_vmm::ErrorKind::kind, [&] { __VA_ARGS__; }, #__VA_ARGS__, __FILE__, __LINE__)

int main(int argc, char** argv) {
  int num_run = 0;
  int num_failed = 0;
  for (const check::Test& test : check::tests) {
    bool is_wanted = argc == 1;
    for (int i = 1; i < argc; ++i) is_wanted = is_wanted || !std::strcmp(argv[i], test.name);
    if (!is_wanted) continue;
    ++num_run;
    try {
      test.run();
      std::printf("ok    %s\n", test.name);
    } catch (const std::exception& error) {
      ++num_failed;
      std::printf("FAIL  %s: %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d run, %d failed\n", num_run, num_failed);
  return num_run && !num_failed ? 0 : 1;
}
