// Whether two C functions, or two structs, are the same to a caller's machine code.
//
//   cuda_abi_check.cpp, acl_abi_check.cpp --> [abi.h]
//
// A type's class is all that a call sees of it: how wide an integer or an enumeration is, how large
// a struct is, and what a pointer points at. Names, signs and `const` are not in it.
#pragma once

#include <cstddef>
#include <type_traits>

namespace sgl_vmm::abi_check {

struct Void {};
template <std::size_t kNumBytes>
struct Integer {};
template <std::size_t kNumBytes, std::size_t kAlignment>
struct Struct {};
template <typename Pointee>
struct Pointer {};
template <typename... Classes>
struct Signature {};

template <typename T, typename = void>
struct ClassOf;  // no class: a kind of type that no checked function uses

template <typename T>
struct ClassOf<T, std::enable_if_t<std::is_void_v<T>>> {
  using type = Void;
};
template <typename T>
struct ClassOf<T, std::enable_if_t<std::is_integral_v<T> || std::is_enum_v<T>>> {
  using type = Integer<sizeof(T)>;
};
template <typename T>
struct ClassOf<T, std::enable_if_t<std::is_class_v<T>>> {
  static_assert(std::is_standard_layout_v<T>);
  using type = Struct<sizeof(T), alignof(T)>;
};
template <typename T, typename = void>
struct PointeeOf {
  using type = Void;  // a struct that the vendor keeps to itself is as good as void
};
template <typename T>
struct PointeeOf<T, std::enable_if_t<!std::is_class_v<T> || sizeof(T) != 0>> : ClassOf<T> {};
template <typename T>
struct ClassOf<T*, void> {
  using type = Pointer<typename PointeeOf<std::remove_cv_t<T>>::type>;
};
template <typename Return, typename... Parameters>
struct ClassOf<Return(Parameters...), void> {
  using type = Signature<typename ClassOf<Return>::type, typename ClassOf<Parameters>::type...>;
};
// Some of the vendors' functions are noexcept in C++.
template <typename Return, typename... Parameters>
struct ClassOf<Return(Parameters...) noexcept, void> : ClassOf<Return(Parameters...)> {};

template <typename Theirs, typename Ours>
inline constexpr bool kSameAbi =
    std::is_same_v<typename ClassOf<Theirs>::type, typename ClassOf<Ours>::type>;

}  // namespace sgl_vmm::abi_check

// A member at the same place and of the same class in both structs.
#define SAME_MEMBER(Theirs, their_member, Ours, our_member)                        \
  static_assert(offsetof(Theirs, their_member) == offsetof(Ours, our_member) &&    \
                    ::sgl_vmm::abi_check::kSameAbi<decltype(Theirs::their_member), \
                                                   decltype(Ours::our_member)>,    \
                #Theirs "." #their_member)

#define SAME_STRUCT(Theirs, Ours) \
  static_assert(::sgl_vmm::abi_check::kSameAbi<Theirs, Ours>, #Theirs)

#define SAME_VALUE(their_constant, our_constant)                                            \
  static_assert(static_cast<long long>(their_constant) == static_cast<long long>(our_constant), \
                #their_constant)
