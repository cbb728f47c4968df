//! Macros for enums whose variants have names. One macro call defines the enum, its names and its parser.

/// Implements `Display` and `FromStr` for a type that has `ALL` and `name`. Errors use the noun `$what` for its values.
#[doc(hidden)]
#[macro_export]
macro_rules! parsed_by_name {
    ($name:ident, $what:literal) => {
        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.pad(self.name())
            }
        }

        impl core::str::FromStr for $name {
            type Err = $crate::error::UnknownName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let found = Self::ALL.iter().copied().find(|value| value.name() == text);
                found.ok_or_else(|| Self::Err::new($what, text, Self::ALL.iter().map(|value| value.name()).collect()))
            }
        }
    };
}

/// Defines an enum from its variants and their names, with `ALL`, `name`, `Display`, `FromStr`, and the same names in JSON.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* enum $name:ident as $what:literal { $($(#[$vmeta:meta])* $variant:ident => $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
        pub enum $name { $($(#[$vmeta])* #[serde(rename = $text)] $variant,)+ }

        impl $name {
            /// All variants, in order.
            pub const ALL: &[$name] = &[$($name::$variant,)+];
            /// Returns the name in the spec, on the command line and in JSON.
            pub const fn name(self) -> &'static str { match self { $($name::$variant => $text,)+ } }
        }

        $crate::format::parsed_by_name!($name, $what);
    };
}

/// Defines an enum for a registry of the spec, whose variants have codes and names.
#[doc(hidden)]
#[macro_export]
macro_rules! registry {
    ($(#[$meta:meta])* $name:ident: $repr:ty as $what:literal {
        $($(#[$vmeta:meta])* $variant:ident = $code:literal => $text:literal,)+
    }) => {
        $crate::format::named! {
            $(#[$meta])*
            #[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
            enum $name as $what { $($(#[$vmeta])* $variant => $text,)+ }
        }

        impl $name {
            /// Returns the code that files contain.
            pub const fn code(self) -> $repr { match self { $($name::$variant => $code,)+ } }
            /// Returns the variant with this code.
            pub const fn from_code(code: $repr) -> Option<Self> { match code { $($code => Some($name::$variant),)+ _ => None } }
        }
    };
}

#[doc(hidden)]
pub use {named, parsed_by_name, registry};
